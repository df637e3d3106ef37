"""`zerolite.compat.deepspeed` in one process: the config as DeepSpeed reads it, and what `import deepspeed` finds."""

from __future__ import annotations

import base64
import inspect
import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import zerolite
import zerolite.compat.deepspeed as deepspeed
from zerolite.compat.deepspeed.runtime.config import read_config, with_accelerates_replicas
from zerolite.compat.deepspeed.utils import logging as log
from zerolite.config import ConfigError, load_config


def test_left_over_auto_and_unknown_keys_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    log._warned.clear()
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.98]}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "allgather_bucket_size": 5e8},
        "zero_optimization.reduce_bucket_size": 1024.0,
        "my_own_key": {"a": 1},
        "steps_per_print": float("inf"),
    }
    before = json.dumps(given)
    with caplog.at_level(logging.WARNING, logger="zerolite"):
        config = read_config(given)
        read_config(given)
    assert config.raw is given and json.dumps(given) == before
    assert config.zerolite == {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.98], "weight_decay": 0.0}},
        "zero_optimization": {"stage": 2, "allgather_bucket_size": 5e8},
        "steps_per_print": float("inf"),
        "gradient_clipping": 1.0,
    }
    load_config(config.zerolite)
    assert [record.args or record.message for record in caplog.records] == [
        "config: zero_optimization.reduce_bucket_size is no key of the config, and is ignored as DeepSpeed does",
        "config: my_own_key is no key of the config, and is ignored as DeepSpeed does",
    ]


def test_deprecated_spellings_are_read() -> None:
    zero = {"stage": 3, "cpu_offload": True, "cpu_offload_params": False, "prefetch_bucket_size": 100}
    zero["stage3_gather_fp16_weights_on_model_save"] = True
    today = {"stage3_gather_16bit_weights_on_model_save": True, "stage3_prefetch_bucket_size": 100}
    expected = {"stage": 3, "offload_optimizer": {"device": "cpu"}, **today}
    assert read_config({"zero_optimization": zero}).zerolite["zero_optimization"] == expected


@pytest.mark.parametrize(
    "given",
    [
        {"zero_optimization": {"stage": 3, "stage3_use_all_reduce_for_fetch_params": True}},
        {"autotuning": {"enabled": True}, "compile": {"deepcompile": True}},
        {"checkpoint": {"use_node_local_storage": True}, "aio": {"use_gds": True}},
    ],
)
def test_what_changes_no_numbers_is_left_out(given: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    log._warned.clear()
    with pytest.raises(ConfigError):
        load_config(given)
    with caplog.at_level(logging.WARNING, logger="zerolite"):
        load_config(read_config(given).zerolite)
    assert "has no effect here" in caplog.text


def test_the_batch_size_counts_every_rank_where_ranks_divide_layers() -> None:
    """As in DeepSpeed, and as transformers' Trainer fills it in."""
    given = {"train_batch_size": 16, "tensor_parallel": {"autotp_size": 2}}
    assert read_config(given).zerolite["train_batch_size"] == 8
    assert read_config(given | {"tensor_parallel": {"size": 2}}).zerolite["train_batch_size"] == 16
    assert read_config(given | {"train_batch_size": "many"}).zerolite["train_batch_size"] == "many"  # an error later
    model, dtype = torch.nn.Linear(1, 1), torch.float32
    assert deepspeed.tp_model_init(model, 2, dtype, given) is model
    with pytest.raises(ValueError, match=r"tensor_parallel\.autotp_size 4, which is tp_size, got 2"):
        deepspeed.tp_model_init(model, 4, dtype, given)
    with pytest.raises(ValueError, match=r"which is tp_size, got 1; write it there"):
        deepspeed.tp_model_init(model, 2, dtype)
    with pytest.raises(ValueError, match=r"expected no tp_group"):
        deepspeed.tp_model_init(model, 2, dtype, given, tp_group=None)


def test_the_shard_size_of_mics_is_used() -> None:
    config = read_config({"zero_optimization": {"stage": 3, "mics_shard_size": 4}})
    assert load_config(config.zerolite).zero_optimization.shard_size == 4


AUTO_EP: dict[str, object] = {
    "expert_tensor_parallel_size": 1, "validate_folding_routing": False, "async_split_plan": True, "preset_model": None,
    "use_grouped_mm": False, "comm_backend": "deepep", "route_norm": None, "route_scale": 1.0, "score_apply": "auto",
    "num_expert_groups": None, "score_func": "auto", "top_k": "auto", "routed_scaling_factor": "auto",
    "load_balance_coeff": None, "expert_w3": None, "expert_activation": None,
}  # fmt: skip


def test_deepspeeds_block_of_experts(caplog: pytest.LogCaptureFixture) -> None:
    """Defaults and keys for speed are accepted; keys that would change numbers are errors."""

    def load(**keys: object) -> Any:
        block = {**AUTO_EP, "autoep_size": 2, **keys}
        return load_config(read_config({"expert_parallel": block}).zerolite)

    on = load(enabled=True)
    assert on.expert_parallel.ranks == 2 and not on.without_effect
    ((path, _),) = load(enabled=True, preset_model="mixtral").without_effect
    assert path == "expert_parallel.preset_model"
    wrong = {"score_func": "sigmoid", "route_norm": False, "route_scale": 2.5, "expert_tensor_parallel_size": 2}
    with pytest.raises(ConfigError) as caught:
        load(enabled=True, **wrong)
    assert {path for path, _ in caught.value.errors} == {f"expert_parallel.{key}" for key in wrong}
    log._warned.clear()
    with caplog.at_level(logging.WARNING, logger="zerolite"):
        assert load().expert_parallel.ranks == load(enabled=False).expert_parallel.ranks == 1, "off unless it says so"
    assert caplog.text.count("no effect without") == 1
    ours = {"expert_parallel": {"size": 4, "preset_model": "mixtral"}}
    for config in (load_config(ours), load_config(read_config(ours).zerolite)):
        assert config.expert_parallel.ranks == 4 and len(config.without_effect) == 1


def test_shared_sequences_are_named_by_the_block() -> None:
    """DeepSpeed's keys make a mesh whose sequence ranks sum no gradients, so nothing here means the same."""
    both = {"sequence_parallel_size": 2, "data_parallel_size": 2}
    for load in (load_config, lambda given: load_config(read_config(given).zerolite)):
        with pytest.raises(ConfigError, match='write "sequence_parallel": {"size": ...}'):
            load(both)
        assert [path for path, _ in load(both | {"sequence_parallel_size": 1}).without_effect] == ["data_parallel_size"]
    with pytest.raises(ValueError, match='write "sequence_parallel"'):
        deepspeed.initialize(model=torch.nn.Linear(1, 1), config={}, mesh_param=(2, 2))
    mpu: Any = deepspeed.utils.groups.SequenceGroups(2, False, True)  # as accelerate's sp_size gives
    values = deepspeed.start._with_deepspeeds_defaults(both, torch.nn.Linear(1, 1), mpu)
    assert load_config(values).sequence_parallel.size == 2


def test_replicas_of_accelerate_are_shard_sizes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = types.SimpleNamespace(dp_replicate_size=2, dp_shard_size=4, sp_size=1)
    state = types.SimpleNamespace(parallelism_config=sizes)
    made = types.SimpleNamespace(is_initialized=lambda: True, AcceleratorState=lambda: state)
    monkeypatch.setitem(sys.modules, "accelerate.state", made)

    def shard_size(**zero: object) -> int | None:
        values = with_accelerates_replicas({"zero_optimization": {"stage": 3, **zero}})
        return load_config(values).zero_optimization.shard_size

    assert shard_size() == shard_size(mics_shard_size=4) == shard_size(mics_shard_size=-1) == 4
    assert shard_size(zero_hpz_partition_size=1) == 4 and shard_size(zero_hpz_partition_size=4) is None
    for key in ("shard_size", "mics_shard_size", "zero_hpz_partition_size"):
        with pytest.raises(ConfigError, match=f"zero_optimization.{key}: expected 4, as dp_shard_size"):
            shard_size(**{key: 2})
    sizes.sp_size = 2
    assert shard_size() == 8
    sizes.dp_shard_size = sizes.sp_size = 1
    log._warned.clear()
    with caplog.at_level(logging.WARNING, logger="zerolite"):
        assert shard_size() is None and "dp_replicate_size without dp_shard_size" in caplog.text
    sizes.dp_replicate_size, sizes.dp_shard_size = 1, 8
    assert shard_size() is None, "all ranks divide the states"


@pytest.mark.parametrize(
    "given",
    [{"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, {"zero_optimization": {"no_such_key": 1}},
     {"sparse_gradients": True}, {"amp": {"enabled": True}}, {"fp16": {"enabled": "yes"}},
     {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}],
)  # fmt: skip
def test_what_would_change_numbers_is_an_error(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        load_config(read_config(given).zerolite)


def test_a_config_is_a_dict_a_file_or_text(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 4, "bf16": {"enabled": true}}')
    encoded = base64.urlsafe_b64encode(path.read_bytes()).decode()
    for source in (path, str(path), path.read_text(), encoded):
        config = read_config(source)
        assert config.raw["train_batch_size"] == 4
        assert config.zerolite["bf16"] == {"enabled": True, "output_dtype": "bf16"}


def test_optimizers_are_those_that_the_kernels_know() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    adam = deepspeed.ops.adam
    assert type(adam.FusedAdam(parameters)) is torch.optim.AdamW
    assert type(adam.FusedAdam(parameters, adam_w_mode=False)) is torch.optim.Adam
    group = {"params": parameters, "lr": 0.5}
    assert adam.DeepSpeedCPUAdam([group], weight_decay=0.1).param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="bias_correction"):
        adam.FusedAdam(parameters, bias_correction=False)


def test_what_is_absent_is_said_in_a_sentence() -> None:
    with pytest.raises(AttributeError, match="no inference engine"):
        _ = deepspeed.init_inference
    with pytest.raises(AttributeError, match="ops"):
        _ = deepspeed.no_such_name


def test_help_shows_the_signature_and_docstring_of_the_engines_method() -> None:
    ours, original = deepspeed.DeepSpeedEngine, zerolite.Engine
    assert inspect.signature(ours.deepspeed_io) == inspect.signature(original.deepspeed_io)
    assert ours.train_batch.__doc__ == original.train_batch.__doc__
    assert ours.global_steps.__doc__ == original.global_steps.__doc__


def test_names_that_scripts_import() -> None:
    runtime = deepspeed.runtime
    runtime.utils.set_random_seed(3)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    helper = deepspeed.compression.helper
    helper.recursive_setattr(model, "0.0", torch.nn.ReLU())
    assert type(helper.recursive_getattr(model, "0.0")) is torch.nn.ReLU
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert float(runtime.utils.clip_grad_norm_([parameter], 1.0)) == 5.0
    assert torch.allclose(parameter.grad, torch.tensor([0.6, 0.8]))
    assert deepspeed.accelerator.is_current_accelerator_supported()
    runtime.utils.see_memory_usage("now", force=True)


def test_a_config_as_an_object() -> None:
    given = {"train_batch_size": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    config = deepspeed.DeepSpeedConfig(given)
    assert config.raw is given
    with pytest.raises(AttributeError, match="'train_batch_size'; read the dict in its attribute raw"):
        _ = config.train_batch_size


SCRIPT = """\
import importlib.metadata, importlib.util, subprocess, sys
spec = importlib.util.find_spec("deepspeed")
assert spec is not None and "torch" not in sys.modules, spec
import deepspeed
assert importlib.metadata.version("deepspeed") == deepspeed.__version__ == deepspeed.version.__version__
assert importlib.util.find_spec("deepspeed") is not None and "torch" not in sys.modules
if sys.argv[1:] != ["parent"]:
    sys.exit()
import deepspeed.runtime.engine
from deepspeed.runtime.engine import DeepSpeedEngine
import zerolite.compat.deepspeed.runtime.engine as ours
assert DeepSpeedEngine is ours.DeepSpeedEngine is deepspeed.DeepSpeedEngine
assert ours.__spec__.name == ours.__name__ == "zerolite.compat.deepspeed.runtime.engine"
import zerolite.compat.deepspeed.compression.helper as helper
from deepspeed.compression.helper import recursive_getattr
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
assert recursive_getattr is helper.recursive_getattr and OffloadDeviceEnum.cpu == "cpu"
for statement, words in {
    "import deepspeed.moe": "no layers for mixtures of experts",
    "from deepspeed import init_inference": "no inference engine",
    "from deepspeed.profiling.flops_profiler import FlopsProfiler": "flops_profiler counts",
    "from deepspeed.monitor.monitor import MonitorMaster": "engine.monitor",
    "from deepspeed.runtime.fp16.loss_scaler import LossScaler": "optimizer.loss_scale",
    "from deepspeed.runtime.pipe.topology import ProcessTopology": "pipeline.stages",
    "from deepspeed.checkpoint.ds_to_universal import main": "at any stage",
    "from deepspeed.utils.timer import SynchronizedWallClockTimer": "wall_clock_breakdown",
    "from deepspeed.compression.compress import init_compression": "it compresses no models",
    "from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live": "zerolite plan",
    "from deepspeed.utils import safe_get_local_grad": "safe_get_full_",
    "from deepspeed.utils.nvtx import instrument_w_nvtx": "record_function",
    "from deepspeed import OnDevice": "torch.device",
}.items():
    try:
        exec(statement)
    except ImportError as error:
        assert "docs/deepspeed.md" in str(error) and words in str(error), error
    else:
        raise AssertionError(statement)
subprocess.run([sys.executable, __file__], check=True)
"""


@pytest.mark.slow
def test_import_deepspeed_finds_ours_where_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "zerolite.compat.deepspeed", "script.py", "parent"]
    environ = {**os.environ, "RANK": "0"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "zerolite.compat.deepspeed" in line]
    assert len(said) == 2, done.stderr  # one for each process
