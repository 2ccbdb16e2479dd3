"""Speculative decoding: a draft model proposes, the big one checks all proposals in one run, both roll back.

`python examples/speculative.py TARGET DRAFT "prompt"` with two rewritten decoders of one vocabulary and a
tokenizer.json beside TARGET. The text is exactly TARGET's greedy text; the draft only saves runs.
"""

import argparse

import numpy as np

from kvfuse.decoder import Decoder, open_decoder
from kvfuse.generate import find_tokenizer


def speculate(
    target: Decoder, draft: Decoder, prompt: list[int], count: int, drafts: int = 4
) -> tuple[list[int], int]:
    """Decodes `count` tokens greedily.

    Args:
        target: a decoder whose caches are inside kvfuse's op.
        draft: another one, of the same vocabulary.
        prompt: at least one token.
        count: tokens to make.
        drafts: proposals in each round.

    Returns:
        The tokens, and how many runs of the target they took.
    """
    tokens, runs = list(prompt), 0
    for decoder in (target, draft):
        decoder.reset()
    while len(tokens) < len(prompt) + count:
        proposed: list[int] = []
        while len(proposed) < drafts:
            (logits,) = draft.step((tokens + proposed)[draft.length :])[-1:]
            proposed.append(int(np.argmax(logits)))
        # One run over what the target has not seen yet and all proposals; row i judges proposal i + 1.
        logits = target.step((tokens + proposed)[target.length :])[-drafts - 1 :]
        runs += 1
        choices = [int(np.argmax(row)) for row in logits]
        accepted = next((i for i in range(drafts) if choices[i] != proposed[i]), drafts)
        tokens += choices[: accepted + 1]
        for decoder in (target, draft):
            decoder.rewind(min(decoder.length, len(tokens) - 1))
    return tokens[len(prompt) :][:count], runs


def main() -> None:
    """Parses the command line, decodes and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("prompt")
    parser.add_argument("--count", type=int, default=32)
    options = parser.parse_args()
    tokenizer = find_tokenizer(options.target)
    prompt = tokenizer.encode(options.prompt)
    tokens, runs = speculate(open_decoder(options.target), open_decoder(options.draft), prompt, options.count)
    print(tokenizer.decode(prompt + tokens))
    print(f"{len(tokens)} tokens in {runs} runs of the target")


if __name__ == "__main__":
    main()
