import subprocess
import sys

import onnx
import pytest

import kvfuse
from kvfuse.formats import PRESETS

COMMANDS = ("rewrite", "unfuse", "inspect", "diff", "verify", "generate", "doctor", "evaluate")


def test_the_installed_command_answers():
    done = subprocess.run([sys.executable, "-c", "from kvfuse.cli import main; main()", "--version"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout == f"kvfuse {kvfuse.__version__}\n"
    assert done.stderr == ""


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_documents_the_exit_codes(run, command):
    result = run(*command, "--help")
    assert result.code == 0
    text = " ".join(result.out.split())
    assert "Exit codes: 0 all is well; 1 a check failed" in text
    assert "2 bad input or usage" in text


def test_help_names_every_command(run):
    text = run("--help").out
    assert all(name in text for name in COMMANDS)


def test_rewrite_writes_a_model_that_runs(run, original, tmp_path):
    before = original.read_bytes()
    result = run("rewrite", original, "-o", tmp_path / "out.onnx")
    assert result.code == 0
    assert "fused" in result.out
    assert original.read_bytes() == before
    assert kvfuse.InferenceSession(tmp_path / "out.onnx").past_length == 0


def test_json_is_all_that_is_printed(run, original, tmp_path):
    result = run("rewrite", original, "-o", tmp_path / "out.onnx", "--json")
    assert result.err == ""
    assert [site["outcome"] for site in result.json["sites"]] == ["fused", "fused"]
    assert result.json["bytes_per_token_after"] < result.json["bytes_per_token_before"]


def attributes(path):
    """The attributes of the first QuantizedKvSdpa node."""
    node = next(n for n in onnx.load(path).graph.node if n.op_type == "QuantizedKvSdpa")
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def test_every_option_reaches_the_op(run, original, tmp_path):
    options = {
        "key_bits": 8,
        "value_bits": 4,
        "codes": "symmetric",
        "group_size": 64,
        "rotation": "none",
        "n_recent": 17,
        "block": 32,
        "n_sink": 3,
        "key_center": "none",
    }
    arguments = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), value)]
    assert run("rewrite", original, "-o", tmp_path / "out.onnx", *arguments).code == 0
    assert options.items() <= attributes(tmp_path / "out.onnx").items()


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_is_accepted(run, original, tmp_path, preset):
    assert run("rewrite", original, "-o", tmp_path / "out.onnx", "--format", preset).code == 0
    assert (tmp_path / "out.onnx").exists()


def test_the_default_preset_is_the_documented_one(run, original, tmp_path):
    assert run("rewrite", original, "-o", tmp_path / "out.onnx").code == 0
    expected = {
        "key_bits": 4,
        "value_bits": 4,
        "codes": "full",
        "group_size": 32,
        "rotation": "hadamard",
        "n_recent": 64,
        "block": 64,
        "n_sink": 4,
        "key_center": "block",
    }
    assert expected.items() <= attributes(tmp_path / "out.onnx").items()


def test_a_dry_run_writes_nothing(run, original, tmp_path):
    result = run("rewrite", original, "-o", tmp_path / "out.onnx", "--dry-run", "--json")
    assert result.code == 0
    assert [site["outcome"] for site in result.json["sites"]] == ["fused", "fused"]
    assert run("rewrite", original, "--dry-run").code == 0
    assert list(tmp_path.iterdir()) == []


def test_inspect_tells_what_a_rewrite_would_do(run, mixed):
    before = mixed.read_bytes()
    result = run("inspect", mixed, "--json")
    assert result.code == 0
    assert sorted(site["outcome"] for site in result.json["sites"]) == ["fused", "refused"]
    refused = next(site for site in result.json["sites"] if site["outcome"] == "refused")
    assert refused["reason"]
    assert mixed.read_bytes() == before
    assert "refused" in run("inspect", mixed).out


def test_doctor_is_healthy_here(run):
    result = run("doctor", "--json")
    assert result.code == 0
    assert result.json["healthy"]
    table = run("doctor")
    assert table.code == 0
    assert "self-test" in table.out


def test_doctor_fails_with_a_problem(run, monkeypatch):
    from kvfuse import selftest

    monkeypatch.setattr(selftest, "one_node_model", lambda attributes: b"no model")
    result = run("doctor")
    assert result.code == 1
    assert "problem: the self-test could not run" in result.out


def test_verify_passes_an_exact_rewrite(run, original, exact):
    result = run("verify", original, exact, "--prompt-length", 6, "--tokens", 5, "--json")
    assert result.code == 0
    assert result.err == ""
    assert result.json["passed"]
    assert result.json["prefill"]["positions"] == 6
    assert result.json["decode"]["max_abs_error"] <= 1e-5
    table = run("verify", original, exact, "--prompt-length", 6, "--tokens", 5)
    assert table.code == 0
    assert "all 5 the same" in table.out


def test_verify_fails_on_a_mismatch(run, original, exact):
    result = run("verify", original, exact, "--prompt-length", 6, "--tokens", 5, "--max-error", 0, "--json")
    assert result.code == 1
    assert not result.json["passed"]


def test_verify_takes_text(run, original, exact, tokenizer):
    arguments = ("verify", original, exact, "--text", "w7 w3 w44", "--tokens", 4)
    result = run(*arguments, "--json")
    assert result.code == 0
    assert result.json["prompt_ids"] == [7, 3, 44]
    assert result.json["original_text"] == result.json["rewritten_text"]
    assert len(result.json["original_text"].split()) == 4
    assert "rewritten:" in run(*arguments, "--tokenizer", tokenizer).out


def test_generate_continues_text(run, original, exact, tokenizer):
    arguments = ("generate", original, "w7 w3 w44", "--max-new-tokens", 5)
    expected = run(*arguments, "--json").json
    assert expected["prompt_ids"] == [7, 3, 44]
    assert len(expected["token_ids"]) == 5
    assert expected["text"].split() == [f"w{token}" for token in expected["token_ids"]]
    assert (
        run("generate", exact, *arguments[2:], "--tokenizer", tokenizer, "--json").json["text"]
        == expected["text"]
    )
    streamed = run(*arguments)
    assert streamed.code == 0
    assert streamed.out.startswith("w7 w3 w44")
    assert streamed.out.split()[-4:] == expected["text"].split()[-4:]


def test_generate_takes_token_ids_without_a_tokenizer(run, original, exact):
    results = [
        run("generate", model, "7, 3 44", "--token-ids", "--max-new-tokens", 5, "--json").json
        for model in (original, exact)
    ]
    assert results[0]["prompt_ids"] == [7, 3, 44]
    assert results[0]["text"] is None
    assert results[0]["token_ids"] == results[1]["token_ids"]
    plain = run("generate", exact, "7 3 44", "--token-ids", "--max-new-tokens", 5)
    assert plain.out.split() == ["7", "3", "44", *map(str, results[0]["token_ids"])]
