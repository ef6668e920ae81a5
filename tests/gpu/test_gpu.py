"""What only a GPU shows. `make test-gpu` runs it; without a GPU every test is skipped and says so.

Through the public functions alone: the CUDA result against the CPU's, precision, determinism, memory that runs out,
memory that comes back, CUDA graphs beside other threads, and two processes that share one GPU.
"""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import shearling
import shearling.engine.cuda_graph
import shearling.engine.distil
import shearling.engine.memory
from data.tiny import bert_config, bert_tokenizer, build
from families import tiny_batches, tiny_model
from tiny import batches_of, model_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]

METHODS = {"surgeon": shearling.Surgeon, "paper": shearling.Paper}
EVERY_METHOD = pytest.mark.parametrize("method", METHODS)


def wide() -> Any:
    """More filters than a panel holds, so that the steps of the order are recorded and replayed."""
    return model_of("bert", intermediate_size=192).double()


def on_gpu(model: Any) -> Any:
    return model.to("cuda")


def pruned_on(device: str, method: str, model: Any = None, precision: str = "float32") -> shearling.Pruned:
    model = (wide() if model is None else model).to(device)
    return shearling.prune(model, batches_of(5, 6), flops=0.5, method=METHODS[method](precision=precision))


def kept(pruned: shearling.Pruned) -> list[list[int]]:
    return [units.tolist() for units in pruned.kept]


def assert_alike(left: shearling.Pruned, right: shearling.Pruned, **tolerance: float) -> None:
    assert kept(left) == kept(right)
    theirs = right.model.state_dict()
    for name, value in left.model.state_dict().items():
        torch.testing.assert_close(value.cpu(), theirs[name].cpu(), **tolerance)


@EVERY_METHOD
def test_every_stage_gives_what_the_cpu_gives(method: str) -> None:
    here, there = pruned_on("cuda", method), pruned_on("cpu", method)
    assert next(here.model.parameters()).device.type == "cuda"
    assert_alike(here, there, rtol=1e-6, atol=1e-8)
    assert here.report.flops == there.report.flops
    assert here.report.fingerprint == there.report.fingerprint
    for mine, theirs in zip(here.report.repairs, there.report.repairs, strict=True):
        assert (mine.sublayer, mine.used) == (theirs.sublayer, theirs.used)
        assert mine.after == pytest.approx(theirs.after, rel=1e-5, abs=1e-9)


def test_a_plan_measured_here_serves_there(tmp_path: Path) -> None:
    batches = batches_of(5, 6)
    shearling.measure(on_gpu(wide()), batches, method=shearling.Surgeon(precision="float32")).save(
        tmp_path / "plan.safetensors"
    )
    plan = shearling.load_plan(tmp_path / "plan.safetensors", wide(), batches)
    assert_alike(plan.prune(flops=0.5), pruned_on("cuda", "surgeon"), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("family", ["bert", "deberta-v3", "modernbert", "vit", "t5", "gpt2", "llama"])
def test_families(family: str, tmp_path: Path) -> None:
    """On the GPU, saved, and read back on the CPU: the same outputs."""
    batches = tiny_batches(family, 3)
    result = shearling.prune(on_gpu(tiny_model(family)), batches, flops=0.5)
    assert result.report.flops.ratio <= 0.5
    result.save(tmp_path / "small")
    inputs = {name: value for name, value in batches[0].items() if name != "labels"}
    with torch.no_grad():
        here = result.model.eval()(**{name: value.cuda() for name, value in inputs.items()})[0].cpu()
        there = shearling.load(tmp_path / "small").eval()(**inputs)[0]
    torch.testing.assert_close(here, there, rtol=1e-2, atol=1e-2 * float(there.abs().max()))


def test_scores_are_those_of_the_cpu() -> None:
    from transformers import BertForSequenceClassification

    from data.tiny import evaluate

    model = build(BertForSequenceClassification, bert_config(num_labels=2))
    rows = [{"sentence": f"the film was {'good' if i % 3 else 'bad'} in {i}", "label": i % 2} for i in range(40)]
    values = [evaluate(model, bert_tokenizer(), rows, "sst2", device=device).value for device in ("cuda", "cpu")]
    assert values[0] == values[1]
    assert next(model.parameters()).device.type == "cpu"  # back where it was


@pytest.mark.parametrize("runtime", ["eager", "graphs"])
def test_a_latency_is_profiled_and_met(runtime: str) -> None:
    model = on_gpu(model_of("bert", intermediate_size=192))
    table = shearling.profile(model, batch_size=4, seq_len=16, seconds=5, runtime=runtime)
    assert torch.cuda.get_device_name() in table.device
    assert table.dense > 0
    result = shearling.prune(model, batches_of(5, 6), latency=0.95, table=table)
    assert result.report.latency["measured"] > 0


@EVERY_METHOD
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision_of_products_and_weights(method: str, precision: str, dtype: torch.dtype) -> None:
    model = on_gpu(model_of("bert").to(dtype))
    result = pruned_on("cuda", method, model, precision)
    assert result.report.flops.ratio <= 0.5
    assert {parameter.dtype for parameter in result.model.parameters()} == {dtype}


@EVERY_METHOD
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_runs_agree_to_the_bit(method: str, precision: str) -> None:
    first, second = (pruned_on("cuda", method, wide().float(), precision) for _ in range(2))
    assert_alike(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("embeds", [False, True])
def test_a_full_gpu_leaves_the_sums_to_the_host(embeds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> Any:
        return wide().base_model if embeds else wide()

    expected = pruned_on("cuda", "surgeon", model())
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda *device: (0, total))
        result = pruned_on("cuda", "surgeon", model())
    assert_alike(result, expected, rtol=1e-6, atol=1e-8)


def test_embedding_models_are_pruned_as_on_the_cpu() -> None:
    method = shearling.Surgeon(precision="float32", polish="off")  # which does more passes on a GPU
    here, there = (
        shearling.prune(wide().base_model.to(device), batches_of(5, 6), flops=0.5, method=method)
        for device in ("cuda", "cpu")
    )
    assert_alike(here, there, rtol=1e-6, atol=1e-8)


def test_stock_shapes_are_those_of_the_cpu() -> None:
    here, there = (
        shearling.prune(
            model_of("bert", num_hidden_layers=4).double().to(device), batches_of(5, 6), flops=0.4, shape="stock",
            method=shearling.Surgeon(precision="float32", polish="off"),
        )
        for device in ("cuda", "cpu")
    )  # fmt: skip
    assert_alike(here, there, rtol=1e-6, atol=1e-8)
    assert here.report.stock["layers"] == there.report.stock["layers"]
    assert here.report.stock["loss"] == pytest.approx(there.report.stock["loss"], rel=1e-4)


@EVERY_METHOD
def test_memory_runs_out_half_way(
    method: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real failed allocation, in the second batch that is too large; the work goes on with smaller ones."""
    monkeypatch.setitem(shearling.engine.memory.BACKWARD_TOKENS, "cuda", 64)  # several batches
    model, seen = on_gpu(wide()), []

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        size = len(kwargs["input_ids"])
        if torch.is_grad_enabled() and size > 2:
            seen.append(size)
            if len(seen) > 1:
                torch.empty(2**50, dtype=torch.uint8, device="cuda")

    model.register_forward_pre_hook(hook, with_kwargs=True)
    result = pruned_on("cuda", method, model)
    assert "Out of memory" in caplog.text
    assert_alike(result, pruned_on("cuda", method), rtol=1e-6, atol=1e-8)


def test_steps_are_replayed_while_other_threads_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replayed.append(1)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    done = threading.Event()

    def load() -> None:
        """What a loader's thread does: allocate and copy, also while a graph is being recorded."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not done.is_set():
                torch.ones(2**20).pin_memory().to("cuda", non_blocking=True)
                stream.synchronize()

    thread = threading.Thread(target=load)
    thread.start()
    try:
        result = pruned_on("cuda", "surgeon")
    finally:
        done.set()
        thread.join()
    assert len(replayed) > 100
    assert_alike(result, pruned_on("cpu", "surgeon"), rtol=1e-6, atol=1e-8)


@EVERY_METHOD
def test_memory_is_returned(method: str) -> None:
    pruned_on("cuda", method)  # libraries keep workspaces of their own from the first use on

    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = used()
    result = pruned_on("cuda", method)
    assert used() > before  # the pruned model
    del result
    assert used() <= before + 2**20


def test_bfloat16_that_is_only_emulated_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a T4: torch runs bfloat16 there, slower than float32."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    model, seen = on_gpu(model_of("bert")), set()

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen.add(output.dtype)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(hook)
    shearling.prune(model, batches_of(5, 6), flops=0.5)  # asks for bfloat16 unless told otherwise
    assert seen == {torch.float32}


WORKER = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
import shearling
from tiny import batches_of, model_of

dist.init_process_group("gloo")
torch.cuda.set_device(0)  # one GPU for both
model = model_of("bert", intermediate_size=192).double().cuda()
pruned = shearling.prune(model, batches_of(5, 6), flops=0.5, method=shearling.Surgeon(precision="float32"))
state = {name: value.cpu() for name, value in pruned.model.state_dict().items()}
torch.save({"kept": [k.tolist() for k in pruned.kept], "weights": state}, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


def test_two_processes_share_one_gpu(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = os.pathsep.join(str(p) for p in (Path(shearling.__file__).parents[1], Path(__file__).parents[1]))
    setting = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **setting, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path)],
            env=environment | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=300)
            assert worker.returncode == 0, errors[-3000:]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
    alone = pruned_on("cuda", "surgeon")
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["kept"] == second["kept"] == kept(alone)
    for name, value in alone.model.state_dict().items():
        assert torch.equal(first["weights"][name], second["weights"][name])
        torch.testing.assert_close(first["weights"][name], value.cpu(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("passes", [8, 20])
def test_polish_replays_its_steps_and_gives_what_plain_steps_give(passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without CUDA graphs, and near the CPU's result; twice the same."""
    refresh = shearling.engine.distil.REFRESH
    monkeypatch.setitem(refresh, "cpu", refresh["cuda"])  # the same noise
    method = shearling.Surgeon(precision="float32", polish=passes)

    def states(device: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        model = model_of("bert", "SequenceClassification").to(device)
        found = shearling.prune(model, batches_of(8, 8), flops=0.3, method=method)
        assert found.report.polish is not None
        return {k: v.cpu() for k, v in found.model.state_dict().items()}, found.report.polish

    replayed, told = states("cuda")
    assert told["after"] < told["before"]
    again, _ = states("cuda")
    for name, value in replayed.items():
        assert torch.equal(value, again[name]), name
    with monkeypatch.context() as patch:
        patch.setattr(shearling.engine.cuda_graph.Replays, "_recorded", lambda self, step: None)
        plain, _ = states("cuda")
    for name, value in replayed.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-3, atol=1e-4)
    if passes == 20:
        return  # rounding has gone too far for that
    here, cpu = states("cpu")
    for name, value in replayed.items():
        torch.testing.assert_close(value, here[name], rtol=0.05, atol=5e-3)
    assert cpu["after"] == pytest.approx(told["after"], rel=0.1)


@pytest.mark.parametrize("family", ["bert", "mpnet", "roberta", "distilbert"])
def test_steps_of_polish_can_be_recorded(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """Not with a copy from the host on the way: without graphs a base-size model takes several times as long."""
    model = tiny_model(family).to("cuda")
    with caplog.at_level("INFO", logger="shearling"):
        shearling.prune(model, tiny_batches(family, 8), flops=0.5, method=shearling.Surgeon(polish=20))  # with noise
    assert not [record for record in caplog.messages if "without CUDA graphs" in record]


def test_a_language_model_polishes_on_texts_of_its_own() -> None:
    model = tiny_model("llama").to("cuda")
    ids = torch.randint(4, 60, (16, 9), generator=torch.Generator().manual_seed(0))
    pruned = shearling.prune(model, [{"input_ids": ids}], flops=0.5, method=shearling.Surgeon(polish=4))
    assert pruned.report.polish is not None
    assert (pruned.report.polish["examples"], pruned.report.polish["own"]) == (16, 16)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is only one GPU here")
@pytest.mark.parametrize("embeds", [False, True])
@pytest.mark.parametrize("shape", ["uneven", "stock"])
def test_a_model_on_two_gpus(embeds: bool, shape: Any) -> None:
    """The same as on one; its first device records the steps of the order before its second."""
    accelerate = pytest.importorskip("accelerate")

    def model() -> Any:
        found = model_of("bert", num_hidden_layers=4, intermediate_size=192).double()
        return found.base_model if embeds else found

    spread, base = model(), "" if embeds else "bert."
    places = {name.removesuffix(".weight").removesuffix(".bias"): 0 for name, _ in spread.named_parameters()}
    places = {name: 0 for name in places if f"{base}encoder" not in name}
    places |= {f"{base}encoder.layer.{i}": int(i > 1) for i in range(4)}
    spread = accelerate.dispatch_model(spread, places, main_device=0)
    method = shearling.Surgeon(precision="float32", polish="off")
    two, one = (
        shearling.prune(each, batches_of(5, 6), flops=0.4, shape=shape, method=method)
        for each in (spread, on_gpu(model()))
    )
    assert {parameter.device.index for parameter in two.model.parameters()} == {0, 1}
    assert_alike(two, one, rtol=1e-6, atol=1e-8)
