"""load -> patterns -> proof -> legality -> lower -> past length -> drop cache I/O -> check -> save."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from .errors import ModelError, OptionError, RefusedError
from .formats import PRESETS, KvFormat, make_format
from .modelfile import Source, read, serialize, write
from .passes.fuse import Decision
from .passes.rewriting import plan_rewriting
from .passes.site import AttentionSite, Refusal, label
from .report import RewriteReport, SiteReport

if TYPE_CHECKING:
    from .auto import AutoChoice, Probe, ProbeLike, Progress
    from .generate import Tokenizer

GUARDS = ("warn", "off")
Model = str | os.PathLike[str] | onnx.ModelProto | ir.Model


def rewrite(
    src: Model,
    dst: str | os.PathLike[str] | None = None,
    *,
    format: str | KvFormat = "default",
    target: float | None = None,
    probe: ProbeLike | Probe | None = None,
    tokenizer: Tokenizer | None = None,
    guard: str = "warn",
    require_all: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    **overrides: Any,
) -> RewriteReport:
    """Replaces every <KV cache, KV cache, SDPA> of a model by kvfuse::QuantizedKvSdpa.

    Args:
        src: A path, an onnx.ModelProto or an onnx_ir.Model; never modified (unless `dst` is the same path).
        dst: Where to write; may be left out for a model in memory, whose result is `report.model`.
        format: A preset's name, a KvFormat, or "auto": every layer's own, chosen from the weights or, with a
            probe, by what each layer loses on it; the choice and its evidence are in the report.
        target: With "auto" and a probe: the allowed relative increase of perplexity, by default 0.01 (1 %).
        probe: With "auto": a text or the path of a text file (needs `tokenizer`), token ids, the path of a
            .npy file of token ids or of a .npz file of input arrays, or input arrays by name. The original is
            run on it; at least 256 tokens, and as much like the real use as possible.
        tokenizer: Turns the probe's text into token ids.
        guard: "warn": where a layer's first low-bit keys turn out too coarse for its queries, a running
            model says so once; "off": it does not look.
        require_all: Refuse to write anything unless every cache site is fused and there is at least one.
        dry_run: Decide and report only.
        progress: Called with (phase, done, total) while a probe runs.
        **overrides: Single options of the format, such as n_recent=4096 or key_bits=8; with "auto" they hold
            for every layer.

    Returns:
        What was fused, what was refused and why, and the proofs.

    Raises:
        ModelError: The model cannot be read or written.
        OptionError: An option is unknown or out of range.
        RefusedError: `require_all`, and a site was refused or none was found.
    """
    automatic = isinstance(format, str) and format == "auto"
    chosen = make_format("default" if automatic else format, overrides)
    _check_options(automatic, target, probe, guard)
    if dst is None and not dry_run and isinstance(src, (str, os.PathLike)):
        raise ModelError(
            f"[{os.fspath(src)}] expected a destination path for a model read from a file; found none"
        )
    source = read(src)
    rewriting = plan_rewriting(source.model)
    decision = rewriting.decision
    destination = None if dst is None or dry_run else Path(dst)
    report = _report(source, rewriting.model.graph, decision, chosen, destination)
    if require_all and (report.refused or not report.fused):
        reason = report.refused[0].reason if report.refused else report.summary()
        raise RefusedError(
            f"[{report.source or 'model'}] expected every cache site to be fused; found: {reason}",
            dataclasses.replace(report, destination=None),
        )
    if dry_run:
        report = dataclasses.replace(report, presets=_preset_bytes(decision.sites))
    if dry_run and not automatic:
        return report
    if decision.sites:
        dropped = {value.name for value in decision.presents}
        kept = [value.name for value in source.model.graph.outputs if value.name not in dropped]
        options = {**chosen.attributes(), "guard": guard}
        model = rewriting.apply(options, source.fingerprint, _metadata(chosen))
        require_order(model.graph)
        require_sound(model.graph, kept)
        source = dataclasses.replace(source, model=model)
        if automatic:
            choice = _choose(model, decision, chosen, tuple(overrides), target, probe, tokenizer, progress)
            report = report.with_choice(choice)
    if dry_run:
        return report
    if destination is not None:
        write(source, changed=bool(decision.sites), destination=destination)
    return _with_model(report, src, source)


def _check_options(automatic: bool, target: float | None, probe: object, guard: str) -> None:
    if guard not in GUARDS:
        raise OptionError(f"[guard] expected one of {', '.join(GUARDS)}; found {guard!r}")
    for name, value in (("target", target), ("probe", probe)):
        if value is not None and not automatic:
            raise OptionError(f"[{name}] expected format 'auto' with it; found another format")
    if target is not None and probe is None:
        raise OptionError("[target] expected a probe to measure by; found none")


def _choose(
    model: ir.Model,
    decision: Decision,
    base: KvFormat,
    pinned: Sequence[str],
    target: float | None,
    probe: ProbeLike | Probe | None,
    tokenizer: Tokenizer | None,
    progress: Progress | None,
) -> AutoChoice:
    """Chooses the layers' formats and writes them into the model's ops."""
    from .auto import DEFAULT_TARGET, choose_formats, read_probe, set_formats
    from .auto.rewritten import Rewritten

    choice = choose_formats(
        Rewritten(model),
        {site.layer: (site.kv_num_heads, site.head_dim, site.value_head_dim) for site in decision.sites},
        base,
        pinned=pinned,
        target=DEFAULT_TARGET if target is None else target,
        probe=None if probe is None else read_probe(probe, tokenizer),
        progress=progress,
    )
    set_formats(model, choice.formats)
    return choice


def inspect(src: Model, *, format: str | KvFormat = "default", **overrides: Any) -> RewriteReport:
    """Reports what `rewrite` would do; writes nothing and changes nothing."""
    return rewrite(src, dry_run=True, format=format, **overrides)


def require_order(graph: ir.Graph) -> None:
    """Checks that every node comes after what it reads, sorting the graph when an insertion broke that.

    Raises:
        ModelError: No order exists; this is a defect of the rewriter, and no file is written.
    """
    defined = {*graph.inputs, *graph.initializers.values()}
    for node in graph:
        if any(operand is not None and operand not in defined for operand in node.inputs):
            break
        defined.update(node.outputs)
    else:
        return
    try:
        graph.sort()
    except ValueError as error:
        raise ModelError(
            f"[rewriter] expected an acyclic graph after rewriting; found a cycle: {error}"
        ) from error


def require_sound(graph: ir.Graph, outputs: Sequence[str | None]) -> None:
    """Checks that a rewritten graph makes all that it reads, and still gives what it gave by the same names.

    Raises:
        ModelError: It does not; this is a defect of the rewriter, and no file is written.
    """
    found = [value.name for value in graph.outputs]
    if found != list(outputs):
        raise ModelError(f"[rewriter] expected the outputs {list(outputs)} after rewriting; found {found}")
    orphan = _orphan(graph, set())
    if orphan is not None:
        raise ModelError(
            f"[rewriter] expected every value to be made before it is read; found {orphan} made nowhere"
        )


def _orphan(graph: ir.Graph, outer: set[ir.Value]) -> str | None:
    """A value that a graph, or one inside it, reads or returns and that nothing makes."""
    defined = outer | {*graph.inputs, *graph.initializers.values()}
    for node in graph:
        for operand in node.inputs:
            if operand is not None and operand not in defined:
                return f"{label(operand)} (read by {label(node)})"
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                inner = _orphan(attribute.as_graph(), defined)
                if inner is not None:
                    return inner
        defined.update(node.outputs)
    return next((label(value) for value in graph.outputs if value not in defined), None)


def _metadata(chosen: KvFormat) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("kvfuse")
    except PackageNotFoundError:  # run from a source tree
        found = "unknown"
    return {"version": found, "options": chosen.attributes()}


def _with_model(report: RewriteReport, src: Model, source: Source) -> RewriteReport:
    if isinstance(src, (onnx.ModelProto, ir.Model)) and not report.fused:
        return dataclasses.replace(report, model=src)
    if isinstance(src, onnx.ModelProto):
        return dataclasses.replace(report, model=serialize(source.model))
    if isinstance(src, ir.Model):
        return dataclasses.replace(report, model=source.model)
    return report


def _report(
    source: Source, graph: ir.Graph, decision: Decision, chosen: KvFormat, destination: Path | None
) -> RewriteReport:
    order = {node: position for position, node in enumerate(graph)}
    cached = [refusal for refusal in decision.refusals if refusal.cached]
    entries: list[tuple[int, SiteReport]] = [
        (order.get(site.anchor, -1), _fused(site)) for site in decision.sites
    ]
    entries += [(order.get(refusal.anchor, len(order)), _refused(refusal)) for refusal in cached]
    sites = [entry for _, entry in sorted(entries, key=lambda pair: pair[0])]
    return RewriteReport(
        source=None if source.path is None else str(source.path),
        destination=None if destination is None else str(destination),
        sites=tuple(sites),
        seen=tuple(_refused(refusal) for refusal in decision.refusals if not refusal.cached),
        bytes_per_token_before=sum(_float_bytes(site) for site in decision.sites),
        bytes_per_token_after=_low_bit_bytes(chosen, decision.sites),
        format=chosen.attributes(),
        fingerprint=source.fingerprint,
        dropped={
            "inputs": _names([cache for site in decision.sites for cache in site.caches]),
            "outputs": _names(decision.presents),
        },
        rewired=tuple(
            {
                "node": label(node),
                "dims": [f"{dim.factor}" if dim.symbol == "1" else _dim(dim) for dim in dims],
            }
            for node, _, dims in decision.rewirings
        ),
    )


def _dim(dim: Any) -> str:
    return str(dim.symbol) if dim.factor == 1 else f"{dim.factor}*{dim.symbol}"


def _names(values: Sequence[ir.Value]) -> tuple[str, ...]:
    return tuple(str(value.name) for value in values)


def _low_bit_bytes(chosen: KvFormat, sites: Sequence[AttentionSite]) -> float:
    """Bytes of one token of all sites."""
    return sum(
        chosen.bytes_per_token(site.kv_num_heads, site.head_dim, site.value_head_dim) for site in sites
    )


def _preset_bytes(sites: Sequence[AttentionSite]) -> dict[str, float]:
    return {name: _low_bit_bytes(chosen, sites) for name, chosen in PRESETS.items()} if sites else {}


def _float_bytes(site: AttentionSite) -> int:
    dtype = site.past_key.dtype or site.dtype
    return int(site.kv_num_heads * (site.head_dim + site.value_head_dim) * dtype.bitwidth // 8)


def _fused(site: AttentionSite) -> SiteReport:
    mask = {
        "kind": site.mask.kind,
        "causal": site.mask.causal,
        "window": site.mask.window_left,
        "padding_input": None if site.mask.padding is None else site.mask.padding.name,
        "proof": [dict(entry) for entry in site.mask.proof],
    }
    details = {
        "num_heads": site.num_heads,
        "kv_num_heads": site.kv_num_heads,
        "head_dim": site.head_dim,
        "value_head_dim": site.value_head_dim,
        "scale": site.scale,
        "softcap": site.softcap,
        "past_key": site.past_key.name,
        "past_value": site.past_value.name,
    }
    return SiteReport(site.layer, "fused", site.pattern, "", label(site.anchor), mask, site.evidence, details)


def _refused(refusal: Refusal) -> SiteReport:
    return SiteReport("", "refused", refusal.pattern, refusal.reason, refusal.node)
