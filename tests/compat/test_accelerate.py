"""Accelerate's paths and names are there, and its shared states behave as its users expect."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

NAMES = {
    "": "Accelerator PartialState ParallelismConfig debug_launcher notebook_launcher skip_first_batches LocalSGD "
    "DataLoaderConfiguration DistributedType init_empty_weights dispatch_model load_checkpoint_and_dispatch "
    "find_executable_batch_size synchronize_rng_states GradScalerKwargs InitProcessGroupKwargs ProfileKwargs",
    "utils": "set_seed gather gather_object broadcast broadcast_object_list reduce pad_across_processes send_to_device "
    "recursively_apply find_batch_size concatenate release_memory ProjectConfiguration GradientAccumulationPlugin "
    "LoggerType patch_environment is_bf16_available extract_model_from_parallel compile_regions tqdm "
    "compute_module_sizes find_tied_parameters OffloadedWeightsLoader write_basic_config DeepSpeedPlugin "
    "save_fsdp_model load_fsdp_optimizer DummyOptim DummyScheduler is_peft_available is_wandb_available",
    "state": "PartialState AcceleratorState GradientState is_initialized",
    "data_loader": "prepare_data_loader DataLoaderShard DataLoaderDispatcher BatchSamplerShard IterableDatasetShard "
    "SeedableRandomSampler SkipBatchSampler SkipDataLoader skip_first_batches",
    "optimizer": "AcceleratedOptimizer",
    "scheduler": "AcceleratedScheduler",
    "tracking": "GeneralTracker TensorBoardTracker WandBTracker register_tracker_class LOGGER_TYPE_TO_CLASS",
    "logging": "get_logger MultiProcessAdapter",
    "big_modeling": "cpu_offload disk_offload init_on_device",
    "hooks": "ModelHook SequentialHook AlignDevicesHook CpuOffload UserCpuOffloadHook add_hook_to_module",
    "launchers": "debug_launcher notebook_launcher",
    "checkpointing": "save_accelerator_state load_accelerator_state save_custom_state load_custom_state",
    "utils.operations": "honor_type is_namedtuple DistributedOperationException",
    "utils.modeling": "set_module_tensor_to_device infer_auto_device_map load_checkpoint_in_model align_module_device",
    "utils.fsdp_utils": "save_fsdp_model load_fsdp_model save_fsdp_optimizer load_fsdp_optimizer "
    "get_parameters_from_modules",
    "utils.constants": "FSDP_MODEL_NAME FSDP_SHARDING_STRATEGY FSDP_AUTO_WRAP_POLICY FSDP_STATE_DICT_TYPE",
    "utils.dataclasses": "get_module_class_from_name FullyShardedDataParallelPlugin",
    "utils.deepspeed": "DummyOptim DummyScheduler DeepSpeedSchedulerWrapper",
    "utils.launch": "prepare_multi_gpu_env PrepareForLaunch",
    "commands.launch": "launch_command launch_command_parser",
    "commands.config": "default_config_file load_config_from_file",
    "utils.memory": "clear_device_cache find_executable_batch_size",
}


@pytest.fixture(autouse=True)
def _fresh_states() -> Any:
    from piledriver.compat.accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.parametrize("path", NAMES)
def test_names_are_where_users_import_them_from(path: str) -> None:
    module = importlib.import_module("piledriver.compat.accelerate" + (f".{path}" if path else ""))
    missing = [name for name in NAMES[path].split() if not hasattr(module, name)]
    assert not missing


def test_the_alias_shares_modules() -> None:
    code = (
        "from piledriver.runtime.launch.alias import install_alias\n"
        "install_alias('accelerate', 'piledriver.compat.accelerate')\n"
        "import accelerate.utils.operations, piledriver.compat.accelerate.utils.operations as ours\n"
        "assert accelerate.utils.operations is ours and ours.__spec__.name.startswith('piledriver')\n"
        "from accelerate.state import PartialState as a\n"
        "from piledriver.compat.accelerate.state import PartialState as b\n"
        "assert a is b\n"
    )
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], check=True)


def test_states_are_shared_and_say_when_they_were_reset() -> None:
    from piledriver.compat.accelerate import Accelerator, PartialState
    from piledriver.compat.accelerate.state import AcceleratorState, GradientState

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    assert GradientState().num_steps == 3
    assert AcceleratorState().mixed_precision == "no"
    with pytest.raises(ValueError, match="already been initialized"):
        Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(True)
    with pytest.raises(AttributeError, match=r"This happens if `AcceleratorState._reset_state\(\)`"):
        _ = accelerator.num_processes
    assert PartialState(cpu=True).num_processes == 1


def test_a_loop_of_theirs(tmp_path: Path) -> None:
    from piledriver.compat.accelerate import Accelerator
    from piledriver.compat.accelerate.utils import ProjectConfiguration, set_seed

    set_seed(3)
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader([(torch.tensor([float(i)]), torch.tensor([2.0 * i])) for i in range(8)], batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(30):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    assert model.weight.item() == pytest.approx(2.0, abs=0.2)
    accelerator.save_state()
    accelerator.load_state()
    accelerator.save_model(model, tmp_path / "weights")
    assert (tmp_path / "weights" / "model.safetensors").is_file()


def test_nested_structures_keep_their_types() -> None:
    from piledriver.compat.accelerate.utils import recursively_apply, send_to_device

    pair = namedtuple("pair", "a b")
    moved = send_to_device(pair(torch.ones(1), [torch.ones(1), "x"]), "meta")
    assert isinstance(moved, pair)
    assert moved.b[0].device.type == "meta"
    with pytest.raises(TypeError, match="Unsupported types"):
        recursively_apply(torch.abs, [1], error_on_other_type=True)


def test_a_loss_repeated_to_the_batch_size_counts_each_sample_once() -> None:
    from piledriver.compat.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(10), batch_size=4))
    assert [len(accelerator.gather_for_metrics(torch.ones(4))) for _ in loader] == [4, 4, 2]
    assert [len(accelerator.gather_for_metrics(list("abcd"))) for _ in loader] == [4, 4, 2]
    even = accelerator.prepare(DataLoader(range(8), batch_size=4))
    assert [len(accelerator.gather_for_metrics(torch.ones(6))) for _ in even] == [6, 6]


def test_the_schedule_is_theirs_and_can_be_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from piledriver.compat.accelerate import Accelerator
    from piledriver.compat.accelerate.accelerator import SCHEDULER_STEPS

    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(type(accelerator), "num_processes", 4)
    assert accelerator.scheduler_steps_per_optimizer_step == 4
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5]
    monkeypatch.setenv(SCHEDULER_STEPS, "once")
    assert accelerator.scheduler_steps_per_optimizer_step == 1


def test_a_plugin_is_where_trainers_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from piledriver.compat.accelerate import Accelerator

    assert Accelerator(cpu=True).state.fsdp_plugin is None
    _ = [kind._reset_state() for kind in _states()]
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    accelerator = Accelerator(cpu=True)
    assert accelerator.state.fsdp_plugin.state_dict_type == "SHARDED_STATE_DICT"
    assert accelerator.layout.zero == 3
    assert accelerator.state.is_fsdp2


def _states() -> list[Any]:
    from piledriver.compat.accelerate.state import AcceleratorState, GradientState

    return [AcceleratorState, GradientState]


def test_their_launch_parser() -> None:
    from piledriver.compat.accelerate.commands.config import load_config_from_file
    from piledriver.compat.accelerate.commands.launch import launch_command_parser

    args = launch_command_parser().parse_args(["--num_processes", "2", "--mixed-precision", "bf16", "a.py", "--x", "1"])
    assert (args.num_processes, args.mixed_precision, args.training_script_args) == (2, "bf16", ["--x", "1"])
    assert load_config_from_file(None).to_dict()["nnodes"] == "1"


TRAINER = """
import json, sys, torch, transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
transformers.logging.set_verbosity_error()
out, fsdp = sys.argv[1], sys.argv[2:] == ["fsdp"]
numbers = torch.Generator().manual_seed(1)
rows = [{"input_ids": (x := torch.randint(0, 50, (8,), generator=numbers)), "labels": x} for _ in range(22)]

def trainer():
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=8)
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    arguments = TrainingArguments(
        output_dir=out, per_device_train_batch_size=2, per_device_eval_batch_size=4, num_train_epochs=1, seed=3,
        learning_rate=1e-2, logging_steps=1, eval_strategy="steps", eval_steps=3, save_steps=3, report_to=[],
        use_cpu=True, disable_tqdm=True, **({"fsdp": "full_shard"} if fsdp else {}),
    )
    return Trainer(model, arguments, train_dataset=rows[:12], eval_dataset=rows[12:])

def told(one):
    keys = ("loss", "eval_loss", "learning_rate")
    return [{k: round(v, 5) for k, v in entry.items() if k in keys} for entry in one.state.log_history]

first = trainer()
first.train()
again = trainer()
again.train(resume_from_checkpoint=out + "/checkpoint-3")
assert told(first) == told(again), (told(first), told(again))
if first.accelerator.is_main_process:
    open(out + "/told.json", "w").write(json.dumps(told(first)))
"""


# A loop in the form of Accelerate's and diffusers' examples: a schedule for the undivided loader, accumulation, metrics
# of uneven data, checkpoints that the main process alone saves, and those that all save.
EXAMPLE = """
import json, sys, torch
from torch.utils.data import DataLoader
from accelerate import Accelerator, DistributedType
from accelerate.utils import set_seed

def training_function(folder, everyone_saves, resume=False):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.distributed_type != DistributedType.XLA
    set_seed(42, device_specific=True)
    numbers = torch.Generator().manual_seed(0)
    rows = [(torch.randn(3, generator=numbers), torch.randn(1, generator=numbers)) for _ in range(41)]
    train, evaluate = DataLoader(rows[:32], shuffle=True, batch_size=2), DataLoader(rows[32:], batch_size=4)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * len(train)))
    model, optimizer, train, evaluate, scheduler = accelerator.prepare(model, optimizer, train, evaluate, scheduler)
    if resume:
        accelerator.load_state(folder)
    told = {"losses": [], "rates": [], "errors": []}
    for epoch in range(resume, 2):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            told["losses"].append(accelerator.reduce(loss.detach(), "mean").item())
            told["rates"].append(scheduler.get_last_lr()[0])
        model.eval()
        errors = []
        for x, y in evaluate:
            with torch.no_grad():
                predicted = model(x)
            predicted, wanted = accelerator.gather_for_metrics((predicted, y))
            errors += (predicted - wanted).flatten().tolist()
        told["errors"].append(errors)
        if epoch == 0 and not resume and (everyone_saves or accelerator.is_main_process):
            accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    told["weights"] = [p.tolist() for p in accelerator.unwrap_model(model).parameters()]
    return told

out = sys.argv[1]
told = {}
for name, everyone_saves in (("main", False), ("all", True)):
    told[name] = training_function(f"{out}/{name}", everyone_saves)
    if "resume" in sys.argv:
        told[f"{name}, resumed"] = training_function(f"{out}/{name}", everyone_saves, resume=True)
accelerator = Accelerator()
if accelerator.is_main_process:
    open(out + "/told.json", "w").write(json.dumps(told))
accelerator.end_training()
"""


@pytest.mark.slow
def test_an_example_in_their_form_on_two_ranks(tmp_path: Path) -> None:
    """The main process may save alone; where all save, the resumed run equals the one that never stopped."""
    told = _example(tmp_path, "resume")
    for name in ("main", "all"):
        whole, resumed = told[name], told[f"{name}, resumed"]
        assert [len(errors) for errors in whole["errors"]] == [9, 9]
        assert whole["rates"][-1] == pytest.approx(0.0)
        assert len(whole["losses"]) == 16
        assert len(resumed["losses"]) == 8
        assert resumed["rates"] == whole["rates"][8:]
    assert told["main"] == told["all"]
    assert told["all, resumed"]["losses"] == told["all"]["losses"][8:]
    assert told["all, resumed"]["weights"] == told["all"]["weights"]


def _example(folder: Path, *words: str) -> dict[str, Any]:
    from piledriver.runtime.launch.agent import launch
    from piledriver.runtime.launch.config import LaunchConfig

    (folder / "example.py").write_text(EXAMPLE)
    launch(LaunchConfig(nproc=2, cpu=True, alias_accelerate=True), str(folder / "example.py"), [str(folder), *words])
    told: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return told


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_an_example_in_their_form_trains_as_with_accelerate(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    told = _example(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, str(tmp_path / "example.py"), str(tmp_path / "theirs")], check=True)
    assert told == json.loads((tmp_path / "theirs" / "told.json").read_text())


TUNING = """
import json, sys, torch, transformers
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
transformers.logging.set_verbosity_error()
out = sys.argv[1]
words = ["<pad>", "<eos>", *(f"w{i}" for i in range(30))]
tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
tokens.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")
torch.manual_seed(0)
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0))
settings = SFTConfig(
    output_dir=out, per_device_train_batch_size=2, max_steps=4, learning_rate=0.1, logging_steps=1, report_to=[],
    use_cpu=True, bf16=False, disable_tqdm=True, max_length=16, save_strategy="no", gradient_checkpointing=False,
)
data = Dataset.from_dict({"text": ["w1 w2 w3 w4", "w1 w2 w3 w5"] * 4})
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
trainer = SFTTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer, peft_config=lora)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
open(out + "/told.json", "w").write(json.dumps([trainer.accelerator.__module__, losses]))
"""


@pytest.mark.slow
def test_trl_tunes_adapters_of_peft(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    from piledriver.runtime.launch.agent import launch
    from piledriver.runtime.launch.config import LaunchConfig

    (tmp_path / "tuning.py").write_text(TUNING)
    launch(LaunchConfig(nproc=1, cpu=True, alias_accelerate=True), str(tmp_path / "tuning.py"), [str(tmp_path)])
    module, losses = json.loads((tmp_path / "told.json").read_text())
    assert module == "piledriver.compat.accelerate.accelerator"
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "words"), [(1, []), (2, ["fsdp"])])
def test_transformers_trainer_trains_evaluates_and_resumes(tmp_path: Path, count: int, words: list[str]) -> None:
    pytest.importorskip("transformers")
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    from piledriver.runtime.launch.agent import launch
    from piledriver.runtime.launch.config import LaunchConfig

    launch(LaunchConfig(nproc=count, cpu=True, alias_accelerate=True), str(script), [str(tmp_path), *words])
    told = json.loads((tmp_path / "told.json").read_text())
    assert [entry["learning_rate"] for entry in told if "learning_rate" in entry][:2] == [
        0.01,
        round(0.01 * (1 - count / 6), 5),
    ]
    assert sum("eval_loss" in entry for entry in told) == (2 if count == 1 else 1)
