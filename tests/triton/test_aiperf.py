"""NVIDIA's load generator for text models, over `generate_stream`. It weighs 840 MB, so it is installed for
evidence only."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.service_process import ServiceProcess

TOOLS = Path(__file__).parents[2] / ".tools"
HOME = TOOLS / "aiperf"
RELEASE = "aiperf==0.13.0"
REQUESTS = 100
SECONDS = 300

TOKENIZER = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"word{n}": n for n in range(1, 100)}}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(sys.argv[1])
"""
"""Of words; its own would be downloaded."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    uv = str(TOOLS / "bin" / "uv")
    if not (HOME / "bin" / "aiperf").exists():
        run(uv, "venv", "--quiet", "--clear", "--python", ">=3.11,<3.13", str(HOME))
        run(uv, "pip", "install", "--quiet", "--python", str(HOME / "bin" / "python"), RELEASE)
    folder = tmp_path_factory.mktemp("tokenizer")
    run(str(HOME / "bin" / "python"), "-c", TOKENIZER, str(folder))
    return folder


@pytest.mark.evidence
def test_it_measures_a_stream_through_the_broker(
    service: ServiceProcess, tokenizer: Path, tmp_path: Path
) -> None:
    template = tmp_path / "payload.j2"
    template.write_text('{"text_input": {{ text|tojson }}, "N": 5, "DELAY_MS": 1, "FAIL_AT": -1}')
    run(
        str(HOME / "bin" / "aiperf"), "profile", "--model", "stream_n", "--url", service.url,
        "--endpoint-type", "template", "--custom-endpoint", "/v2/models/stream_n/generate_stream",
        "--streaming", "--extra-inputs", f"payload_template:{template}",
        "--extra-inputs", "response_field:text_output", "--tokenizer", str(tokenizer),
        "--header", f"Authorization:Bearer {service.token}", "--concurrency", "8",
        "--request-count", str(REQUESTS), "--output-artifact-dir", str(tmp_path / "told"),
        "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
    )  # fmt: skip
    [told] = (tmp_path / "told").rglob("profile_export_aiperf.json")
    measured = json.loads(told.read_text(encoding="utf-8"))
    assert measured["request_count"]["avg"] == REQUESTS
    assert measured.get("error_request_count") is None
    assert measured["time_to_first_token"]["avg"] > 0


def run(*command: str) -> None:
    env = {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
