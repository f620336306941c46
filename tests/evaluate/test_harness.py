"""Our models under the evaluation harness: the same bits per byte and the same answers as ours, by the real package."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from piledriver.core.errors import MissingDependencyError, UsageError
from piledriver.corpus import ShardFileWriter, read_shards
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.evaluate import Choice, TransformerScorer, bits_per_byte, multiple_choice, summarise
from piledriver.evaluate.choices import encode_pair
from piledriver.evaluate.harness import HarnessModel, model_class
from piledriver.models import Transformer
from piledriver.models.interchange import save_folder
from tests.patience import HANG_S

from .conftest import DOCUMENTS

CHOICES = [
    Choice("The quick brown", (" fox jumps", " dog", " lazy"), 0),
    Choice("The lazy ", ("dog.", "x + 1", "fox over the quick"), 1),
    Choice("def f(x):\n    return", (" x + 1", " dog"), 0),
    Choice("", ("over", "jumps"), 1),
    Choice("return x", (" + 1\n", " fox", " the", " brown"), 2),
]
TASKS = {
    "local_bpb": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
    "local_choice": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{answers}}"
doc_to_target: "{{correct}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "local_words": """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{words}}"
target_delimiter: ""
generation_kwargs: {until: ["\\n"], do_sample: false, max_gen_toks: 6}
metric_list: [{metric: exact_match}]
""",
}


def asked(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


@pytest.fixture
def harness(model: Transformer, tokenizer: Tokenizer) -> HarnessModel:
    return HarnessModel(scorer=TransformerScorer(model), tokenizer=tokenizer)


def test_likelihoods_and_whether_they_are_the_likeliest(
    model: Transformer, tokenizer: Tokenizer, harness: HarnessModel
) -> None:
    cases = [("The quick", " brown fox"), ("The quick ", "brown"), ("", "x + 1"), ("a " * 30, "lazy dog. " * 9)]
    answers = harness.loglikelihood([asked(*case) for case in cases])
    for (context, continuation), (found, _) in zip(cases, answers, strict=True):
        before, after = encode_pair(tokenizer, context, continuation)
        assert tokenizer.decode(before + after) == context + continuation
        sequence = [tokenizer.boundary(), *before, *after][-17:]
        fresh = min(len(after), 16)
        with torch.no_grad():
            log_p = model(torch.tensor([sequence[:-1]]))[0].double().log_softmax(-1)
        expected = sum(log_p[i, sequence[i + 1]] for i in range(len(sequence) - 1 - fresh, len(sequence) - 1))
        assert found == pytest.approx(float(expected), rel=1e-5)
    drawn = harness.generate_until([asked("The quick", {"until": [], "max_gen_toks": 4})])[0]
    again = harness.loglikelihood([asked("The quick", drawn)])[0]
    assert again[1] == (tokenizer.encode("The quick" + drawn).tolist()[2:] == tokenizer.encode(drawn).tolist())


def test_greedy_text_stops_where_it_should(model: Transformer, tokenizer: Tokenizer, harness: HarnessModel) -> None:
    ids = [tokenizer.boundary(), *tokenizer.encode("The").tolist()]
    with torch.no_grad():
        while len(ids) < 10:
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    plain = tokenizer.decode(ids[2:])
    wishes = {"until": [], "max_gen_toks": 8, "do_sample": False}
    assert harness.generate_until([asked("The", wishes)]) == [plain.split("<|endoftext|>")[0]]
    stop = plain[2:4]
    assert harness.generate_until([asked("The", {**wishes, "until": [stop]})]) == [plain.split(stop)[0]]
    with pytest.raises(UsageError, match="samples its answers"):
        harness.generate_until([asked("The", {"do_sample": True, "temperature": 0.7})])


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_the_package_the_error_says_what_to_install() -> None:
    with pytest.raises(MissingDependencyError, match=r"piledriver\[lm-eval\]"):
        model_class()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: Transformer, tokenizer_file: Path) -> Path:
    """A model folder, documents, and tasks over local files: nothing is fetched."""
    here = tmp_path_factory.mktemp("harness")
    save_folder(model, here / "model")
    shutil.copy(tokenizer_file, here / "model" / "tokenizer.json")
    texts = [document for document in DOCUMENTS if document.text]
    with ShardFileWriter(here / "corpus.jsonl.zst") as shard:
        for document in texts:
            shard.write(document)
    rows = {
        "local_bpb": [{"text": document.text} for document in texts],
        "local_choice": [{"context": c.context, "answers": list(c.answers), "correct": c.correct} for c in CHOICES],
        "local_words": [{"context": context, "words": "nothing that it would say"} for context in ("The", "x =")],
    }
    (here / "tasks").mkdir()
    for task, described in TASKS.items():
        (here / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[task]))
        data = json.dumps({"data_files": {"test": str(here / f"{task}.jsonl")}, "cache_dir": str(here / "cache")})
        head = f"task: {task}\ndataset_path: json\ndataset_kwargs: {data}\ntest_split: test\n"
        (here / "tasks" / f"{task}.yaml").write_text(head + described)
    return here


def harness_says(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_real_harness_agrees_on_two_processes(folder: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    pytest.importorskip("lm_eval")
    launch = ["piledriver.cli.main", "launch", "--nproc", "2", "--module", "piledriver.cli.main"]
    said = harness_says(
        *launch, "evaluate", "lm-eval", "--model", str(folder / "model"), "--include", str(folder / "tasks"),
        "--tasks", "local_bpb,local_choice,local_words", "--json",
    )  # fmt: skip
    results = json.loads(said[said.index("{") : said.rindex("}") + 1])["results"]
    scorer = TransformerScorer(model)
    ours = summarise(bits_per_byte(scorer, tokenizer, DOCUMENTS), resamples=0)["all"]
    assert results["local_bpb"]["bits_per_byte,none"] == pytest.approx(ours.bits_per_byte, abs=1e-4)
    choice = multiple_choice(scorer, tokenizer, CHOICES)
    assert 0 < choice.accuracy < 1, "a test that both all and none right would pass is none"
    assert results["local_choice"]["acc,none"] == pytest.approx(choice.accuracy, abs=1e-9)
    assert results["local_choice"]["acc_norm,none"] == pytest.approx(choice.accuracy_by_bytes, abs=1e-9)
    assert results["local_words"]["exact_match,none"] == 0


@pytest.mark.slow
def test_its_own_command_line_knows_our_model(folder: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    pytest.importorskip("lm_eval")
    harness_says(
        "piledriver.evaluate.harness", "run", "--model", "piledriver", "--model_args", f"pretrained={folder / 'model'}",
        "--tasks", "local_bpb", "--include_path", str(folder / "tasks"), "--output_path", str(folder / "out"),
    )  # fmt: skip
    (path,) = (folder / "out").rglob("results*.json")
    theirs = json.loads(path.read_text())["results"]["local_bpb"]
    documents = read_shards(folder / "corpus.jsonl.zst")
    ours = summarise(bits_per_byte(TransformerScorer(model), tokenizer, documents), resamples=0)["all"]
    assert theirs["bits_per_byte,none"] == pytest.approx(ours.bits_per_byte, abs=1e-4)
