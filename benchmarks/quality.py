"""`make quality`: what cache formats cost on real models, in one table per model and context, with pictures.

`python benchmarks/quality.py [--model smollm2|gemma3] [--context 512|4096] [--only WORDS] [--fresh]` builds
the models, measures every variant that `build/quality/` does not hold yet, draws pictures and writes tables
into docs/quality.md. What is kvfuse's is measured with the product itself, through the cache; other runtimes'
caches are simulated inside the same model by their quantization rules (benchmarks/quality_formats.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

import kvfuse
from benchmarks import quality_tables
from benchmarks.quality_variants import (
    ABLATIONS,
    CHOSEN,
    CONTENDER,
    FLOAT_QUERIES,
    LONG_ABLATIONS,
    PRESET_VARIANTS,
    SIMULATED,
    WITH_EXTRAS,
    Variant,
)
from kvfuse.evaluate import Observation, Reference, compare, record
from kvfuse.evaluate_plan import Plan, make_plan
from kvfuse.evaluate_report import Result
from kvfuse.evaluate_scores import TokenScores, score, summarize
from kvfuse.evaluate_text import read_text
from kvfuse.formats import make_format
from kvfuse.generate import find_tokenizer

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "quality"
MODELS = ("smollm2", "gemma3")
CONTEXTS = (512, 4096)
PROBE_TOKENS = 1024
WINDOWS = {("smollm2", 512): 4, ("gemma3", 512): 1, ("smollm2", 4096): 1, ("gemma3", 4096): 1}


class Setting:
    """One model at one context: its folder of references and results.

    Args:
        model: a name of MODELS.
        context: tokens of a window, one of CONTEXTS.
    """

    def __init__(self, model: str, context: int) -> None:
        self.model, self.context = model, context
        self.folder = WORK / f"{model}-{context}"
        self.folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def path(self) -> Path:
        """The original, built if need be."""
        from models import gemma3, smollm2

        builders: dict[str, Callable[[Path], Path]] = {"smollm2": smollm2.build, "gemma3": gemma3.build}
        return builders[self.model](ROOT / "models" / "build" / self.model)

    @cached_property
    def checkpoint(self) -> Any:
        """The weights, for simulations."""
        from models import sources

        if self.model == "smollm2":
            from models.gguf_checkpoint import GgufCheckpoint

            return GgufCheckpoint(sources.fetch(sources.read_source("smollm2-135m-instruct")))
        from models.gemma3_checkpoint import Gemma3Checkpoint

        return Gemma3Checkpoint(sources.fetch_split(sources.read_split_source("gemma3-270m")))

    @cached_property
    def plan(self) -> Plan:
        """Text to score; at context 512 also greedy text, needles, and layers on the first window."""
        extras = {"greedy": 24} if self.context == 512 else {"greedy": 0, "depths": (), "layer_tokens": 0}
        windows = WINDOWS[self.model, self.context]
        tokenizer = find_tokenizer(self.path)
        return make_plan(read_text(), tokenizer, context=self.context, windows=windows, **extras)

    @cached_property
    def reference(self) -> Reference:
        """The original's answers; its logits are kept in the folder."""
        stored, key = self.folder / "reference.pickle", repr(self.plan)
        if stored.exists():
            found_key, found = pickle.loads(stored.read_bytes())
            if found_key == key:
                assert isinstance(found, Reference)
                return found
        fresh = record(self.path, self.plan, self.folder)
        stored.write_bytes(pickle.dumps((key, fresh)))
        return fresh

    @cached_property
    def scores_only(self) -> Reference:
        """The reference without prompts, needles and layers."""
        plan = Plan(self.plan.windows)
        return dataclasses.replace(
            self.reference, plan=plan, observation=Observation(scores=self.reference.observation.scores)
        )

    def variants(self) -> list[Variant]:
        """The lines of this setting's tables."""
        from benchmarks.quality_formats import CONTENDERS

        contenders = [Variant(contender.name, CONTENDER) for contender in CONTENDERS]
        long = self.model == "gemma3" and self.context > 512
        return [
            *PRESET_VARIANTS,
            CHOSEN,
            *contenders,
            *(LONG_ABLATIONS if long else ABLATIONS),
            *FLOAT_QUERIES,
        ]

    def result(self, variant: Variant) -> dict[str, Any] | None:
        """The stored result of a variant, None when there is none."""
        path = self.folder / f"{variant.slug}.json"
        if not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        return found if found["options"] == variant.options() and found["text"] == self.text_hash else None

    @cached_property
    def text_hash(self) -> str:
        """Tells one choice of tokens from another."""
        return hashlib.sha256(repr(self.plan.windows).encode()).hexdigest()[:12]

    def measure(self, variant: Variant) -> dict[str, Any] | None:
        """Measures a variant and stores the result; None where this kvfuse has no such format."""
        start = time.perf_counter()
        if variant.kind in (CONTENDER, SIMULATED):
            figures = self._simulate(variant)
        else:
            try:
                figures = self._run(variant)
            except kvfuse.OptionError as error:
                print(f"  {variant.name}: {error}", flush=True)
                return None
        found = {
            "name": variant.name,
            "kind": variant.kind,
            "options": variant.options(),
            "text": self.text_hash,
            "seconds": round(time.perf_counter() - start, 1),
            **figures,
        }
        (self.folder / f"{variant.slug}.json").write_text(json.dumps(found, indent=1))
        return found

    def _run(self, variant: Variant) -> dict[str, Any]:
        rewritten = self.path.with_name("model.quality.onnx")
        options: dict[str, Any] = dict(variant.overrides)
        if variant.preset == CHOSEN.preset:
            # Text that is not scored: it lies behind the windows.
            options["probe"] = find_tokenizer(self.path).encode(read_text()[200_000:210_000])[:PROBE_TOKENS]
        report = kvfuse.rewrite(self.path, rewritten, format=variant.preset, require_all=True, **options)
        reference = self.reference if variant.name in WITH_EXTRAS else self.scores_only
        if not variant.environment:
            return compare(reference, rewritten).to_dict() | {"fused": len(report.fused)}
        # The library reads its environment once, so another process has to.
        command = [sys.executable, __file__, "--model", self.model, "--context", str(self.context)]
        done = subprocess.run(
            [*command, "--compare", str(rewritten)],
            env=os.environ | variant.environment,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return figures | {"fused": len(report.fused)}

    def _simulate(self, variant: Variant) -> dict[str, Any]:
        from benchmarks.quality_formats import CONTENDERS, Simulated

        head_dim = self.checkpoint.config.head_dim
        if variant.kind == SIMULATED:
            chosen = make_format(variant.preset, variant.overrides)
            store, bits = Simulated(chosen, quantize_queries=False).store, chosen.bits_per_element(head_dim)
        else:
            contender = next(one for one in CONTENDERS if one.name == variant.name)
            store, bits = contender.store, contender.bits(head_dim)
        scores = []
        for index, window in enumerate(self.plan.windows):
            expected = np.load(self.reference.folder / f"window_{index}.npy", mmap_mode="r")
            pieces, start = [], 0
            for rows in self._decoder.logits(self._decoder.hidden(list(window), store)):
                end = min(start + len(rows), len(window) - 1)
                targets = np.asarray(window[start + 1 : end + 1], np.int64)
                pieces.append(score(rows[: end - start], targets, expected[start:end]))
                start += len(rows)
            scores.append(TokenScores(*(np.concatenate([getattr(piece, name) for piece in pieces])
                                        for name in ("nll", "kl", "same"))))  # fmt: skip
        return summarize(scores, self.reference.observation.scores).to_dict() | {"bits_per_element": bits}

    @cached_property
    def _decoder(self) -> Any:
        from benchmarks.quality_torch import TorchDecoder

        return TorchDecoder(self.checkpoint.config, self.checkpoint.weight)


def compare_only(setting: Setting, rewritten: Path) -> Result:
    """Compares one rewritten model in this process."""
    return compare(setting.scores_only, rewritten)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing, then writes tables and pictures."""
    parser = argparse.ArgumentParser(description="Measure cache formats on real models.")
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--context", type=int, choices=CONTEXTS, action="append", help="default: all")
    parser.add_argument("--only", help="measure only variants of this kind, or whose name this pattern finds")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/quality.md as it is")
    parser.add_argument("--compare", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    settings = [
        Setting(model, context)
        for context in options.context or CONTEXTS
        for model in options.model or MODELS
    ]
    if options.compare is not None:
        print(json.dumps(compare_only(settings[0], options.compare).to_dict()))
        return 0
    for setting in settings:
        print(f"{setting.model}, context {setting.context}, text {setting.text_hash}", flush=True)
        for variant in setting.variants():
            if options.only and not re.search(options.only, variant.name) and options.only != variant.kind:
                continue
            if options.fresh or setting.result(variant) is None:
                found = setting.measure(variant)
                if found is not None:
                    print(f"  {quality_tables.line(found)}  ({found['seconds']} s)", flush=True)
    if not options.no_docs:
        quality_tables.write(ROOT, [Setting(model, context) for context in CONTEXTS for model in MODELS])
    return 0


if __name__ == "__main__":
    sys.exit(main())
