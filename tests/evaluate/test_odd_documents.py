"""What newcomers feed to `piledriver evaluate bpb`: empty, broken and foreign things, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from piledriver.cli.main import main
from piledriver.core.errors import CorruptFileError, UsageError
from piledriver.corpus import Document
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.evaluate import TransformerScorer, bits_per_byte, open_scorer, summarise
from piledriver.evaluate.report import as_json, as_text, paper_figures, save_chart
from piledriver.evaluate.scorers import TransformersScorer
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import save_folder


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.fixture
def figures(model: Transformer, tokenizer: Tokenizer) -> Any:
    documents = [Document("", source="empty"), Document("", source="empty"), Document("one", source="one")]
    documents += [Document("a source called", source="all"), Document("like the sum", source="all")]
    return summarise(bits_per_byte(TransformerScorer(model), tokenizer, documents))


def test_sources_without_text_and_of_one_document(figures: Any, tmp_path: Path) -> None:
    assert list(figures) == ["empty", "one", "(source all)", "all"]
    rows = json.loads(json.dumps(as_json(figures)), parse_constant=refuse)["bits_per_byte"]
    assert (rows["empty"]["bits_per_byte"], rows["empty"]["low"]) == (None, None)
    assert (rows["one"]["documents"], rows["one"]["low"]) == (1, None)
    assert rows["all"]["documents"] == 5
    assert rows["all"]["low"] <= rows["all"]["bits_per_byte"] <= rows["all"]["high"]
    table = {line.split("  ")[0]: line for line in as_text(figures).splitlines()}
    assert "nan" not in as_text(figures)
    for source, row in rows.items():
        assert ("-" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}") in table[source]
    save_chart(figures, tmp_path / "chart.png")


def test_the_papers_total_stands_beside_a_total_of_its_own_sources_only(figures: Any) -> None:
    row = figures["one"]
    assert as_json(figures)["bits_per_byte"]["all"]["paper"] is None
    whole = dict.fromkeys(paper_figures(), row)
    assert as_json(whole)["bits_per_byte"]["all"]["paper"]["gpt3-davinci"] == 0.7177
    assert "0.7177" in as_text(whole)


def test_half_a_surrogate_pair_is_a_question_mark(model: Transformer, tokenizer: Tokenizer) -> None:
    broken, plain = bits_per_byte(TransformerScorer(model), tokenizer, [Document("x \ud800 y"), Document("x ? y")])
    assert (broken.nats, broken.bytes) == (plain.nats, plain.bytes) != (0.0, 0)


def test_a_tokenizer_of_another_vocabulary(tokenizer: Tokenizer) -> None:
    small = Transformer(ModelConfig(vocab_size=64, dim=16, layers=1, heads=2, max_positions=16))
    with pytest.raises(UsageError, match=r"document 1 has the token id \d+, but the model.s vocabulary has 64 ids"):
        bits_per_byte(TransformerScorer(small), tokenizer, [Document(""), Document("naïve")])


def test_families_that_are_not_ours_run_through_transformers_and_missing_weights_are_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": tokenizer.vocab_size, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4}
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("codegen", **shape))
    theirs.save_pretrained(tmp_path / "codegen")
    scorer = open_scorer(tmp_path / "codegen", length=16)
    assert isinstance(scorer, TransformersScorer)
    (score,) = bits_per_byte(scorer, tokenizer, [Document("x")])
    with torch.no_grad():
        logits = theirs.eval()(torch.tensor([[tokenizer.boundary()]])).logits[0, 0].double()
    assert score.nats == pytest.approx(-float(logits.log_softmax(-1)[int(tokenizer.encode("x")[0])]), rel=1e-6)
    config = json.loads((tmp_path / "codegen" / "config.json").read_text())
    (tmp_path / "codegen" / "config.json").write_text(json.dumps({**config, "n_layer": 2}))
    with pytest.raises(CorruptFileError, match=r"has no tensor transformer.h.1"):
        open_scorer(tmp_path / "codegen")


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.BertForMaskedLM(transformers.BertConfig(**shape, intermediate_size=16)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"\(bert\) sees the tokens that it would have to predict"):
        open_scorer(tmp_path)


def test_figures_are_printed_before_a_chart_can_fail(
    model: Transformer, tokenizer_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_folder(model, tmp_path / "model")
    (tmp_path / "text.jsonl").write_text('{"text": "one document"}\n')
    (tmp_path / "file").touch()
    verb = ["evaluate", "bpb", "--model", str(tmp_path / "model"), "--corpus", str(tmp_path / "text.jsonl")]
    verb += ["--tokenizer", str(tokenizer_file), "--chart", str(tmp_path / "file" / "chart.png"), "--json"]
    assert main(verb) == 1
    assert json.loads(capsys.readouterr().out, parse_constant=refuse)["bits_per_byte"]["all"]["documents"] == 1
