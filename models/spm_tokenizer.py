"""Makes the sentencepiece-style BPE tokenizer that Gemma uses, from tokens and scores."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

SPACE = "▁"
CONTROL, USER_DEFINED = 3, 4


def spm_bpe(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], bos: int) -> Tokenizer:
    """Returns the tokenizer: spaces become "▁", unknown characters bytes, and texts start with token `bos`.

    Args:
        tokens: by id.
        scores: the higher, the earlier two neighbours are merged into that token.
        types: sentencepiece's kinds of token by id; 3 control, 4 user-defined (found before any merging).
        bos: id of the token before every text.
    """
    # Converters write the runs of spaces among the user-defined tokens with plain spaces.
    tokens = [
        token.replace(" ", SPACE) if kind == USER_DEFINED else token
        for token, kind in zip(tokens, types, strict=True)
    ]
    ids = {token: index for index, token in enumerate(tokens)}
    merges = []
    for index, token in enumerate(tokens):
        if types[index] == CONTROL:
            continue
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [(scores[index], left, right) for left, right in splits if left in ids and right in ids]
    merges.sort(key=lambda merge: (-merge[0], ids[merge[1]], ids[merge[2]]))
    pairs = [(left, right) for _, left, right in merges]
    tokenizer = Tokenizer(models.BPE(ids, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    kinds = {CONTROL: True, USER_DEFINED: False}
    for kind, special in kinds.items():
        named = [token for token, found in zip(tokens, types, strict=True) if found == kind]
        added = [AddedToken(token, special=special, normalized=SPACE in token) for token in named]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    start = tokens[bos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, bos)]
    )
    return tokenizer
