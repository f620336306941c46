"""A tiny model with a chat template, and a server in a process of its own, as a user starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import save_folder
from tests.patience import HANG_S

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = ["The quick brown fox jumps over the lazy dog.", "Once upon a time there was a house.", "naïve café 東京 🙂"]


def make_folder(folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    model = Transformer(ModelConfig(vocab_size=320, dim=32, layers=2, heads=4, max_positions=1024), seed=3)
    model.generation["eos_token_id"] = tokenizer.token_to_id("<|endoftext|>")
    save_folder(model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("served") / "tiny")


class Server:
    """`piledriver serve` in a process."""

    def __init__(self, folder: Path, *words: str) -> None:
        command = [sys.executable, "-m", "piledriver.cli.main", "serve", str(folder), "--port", "0", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "http://" in line, line + self.process.stdout.read()
        self.url = "http://" + line.split("http://")[1].split()[0]

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=HANG_S).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(HANG_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Server]:
    started = Server(folder, "--deterministic")
    yield started
    started.stop()


@pytest.fixture(scope="session")
def post(server: Server) -> Any:
    """`post(path, **fields)`: the JSON answer, which must be a success."""
    with httpx.Client(base_url=server.url, timeout=HANG_S) as client:

        def call(path: str, **fields: Any) -> Any:
            answer = client.post(path, json=fields)
            assert answer.status_code == 200, answer.text
            return answer.json()

        yield call
