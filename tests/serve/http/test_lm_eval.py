"""lm-eval against a live server: log-likelihoods over HTTP are those in process, chat answers arrive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.models.interchange import load_folder
from piledriver.serve import Engine, SamplingParams
from tests.patience import HANG_S
from tests.serve.http.conftest import Server

QUESTIONS = [("Once upon", (" a time", " the dog", " x")), ("The quick", (" brown fox", " house"))]
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{answers}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "words": """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "nothing that it would say"
generation_kwargs: {until: ["\\n\\n"], do_sample: false, max_gen_toks: 5}
metric_list: [{metric: exact_match}]
""",
}
SCRIPT = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
url, folder, here = sys.argv[1:]
manager = TaskManager(include_path=here, include_defaults=False)
def run(kind, path, task, **options):
    model = f"model=tiny,base_url={url}{path},tokenizer={folder},tokenizer_backend=huggingface,tokenized_requests="
    model += "True" if kind == "local-completions" else "False"
    found = simple_evaluate(kind, model_args=model, tasks=[task], task_manager=manager, bootstrap_iters=0, **options)
    return [[one["resps"], one["filtered_resps"]] for one in found["samples"][task]]
scores = run("local-completions", "/v1/completions", "choice")
chats = run("local-chat-completions", "/v1/chat/completions", "words", apply_chat_template=True)
print("RESULT", json.dumps({"scores": scores, "chats": chats}))
"""


@pytest.mark.slow
def test_lm_eval_scores_over_http_as_in_process(folder: Path, server: Server, tmp_path: Path) -> None:
    for package in ("lm_eval", "tenacity", "aiohttp"):
        pytest.importorskip(package, reason="needs lm-eval[api]")
    rows = [{"context": context, "answers": list(answers)} for context, answers in QUESTIONS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task, described in TASKS.items():
        data = {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")}
        head = f"task: {task}\ndataset_path: json\ndataset_kwargs: {json.dumps(data)}\ntest_split: test\n"
        (tmp_path / f"{task}.yaml").write_text(head + described)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, server.url, str(folder), str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.split("RESULT ")[1])
    engine, tokenizer = Engine(load_folder(folder).requires_grad_(False), deterministic=True), open_tokenizer(folder)
    for (context, answers), (responses, _) in zip(QUESTIONS, found["scores"], strict=True):
        for answer, [[score, greedy]] in zip(answers, responses, strict=True):
            start, whole = tokenizer.encode(context), tokenizer.encode(context + answer)
            [output] = engine.generate([whole.tolist()], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
            scored = [entry for entry in output.prompt_logprobs or [] if entry is not None][len(start) - 1 :]
            assert score == pytest.approx(sum(entry.logprob for entry in scored), abs=1e-6)
            assert greedy == all(entry.token == entry.top[0][0] for entry in scored)
    for [[text]], [kept] in found["chats"]:
        assert isinstance(text, str)
        assert kept == text
