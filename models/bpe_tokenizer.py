"""Makes the byte-level BPE tokenizer with digit split that SmolLM2 uses."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from models.gguf_checkpoint import Vocabulary


def byte_level_bpe(vocabulary: Vocabulary) -> Tokenizer:
    """Returns the tokenizer; it adds no token of its own, and special tokens in the text become their ids.

    Text is split at every digit, then as GPT-2 splits it; bytes are the base alphabet, so any text
    round-trips.
    """
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(vocabulary.tokens[index], special=True, normalized=False) for index in vocabulary.special
    ]
    tokenizer.add_special_tokens(special)
    return tokenizer
