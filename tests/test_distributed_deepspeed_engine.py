"""What the DeepSpeedStepper does about its engine: DeepSpeed's own scale, checkpoints, the log, and what is refused."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from reference.deepspeed_engines import batches, make_engine, make_stepper, numbers_of, sum_of_loss, warm_up, weights_of
from reference.nets import CPU

from halfstep import HalfstepError
from halfstep.distributed import DeepSpeedStepper, deepspeed_config
from halfstep.errors import ScaleExhausted

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed, which is for Linux alone")


@pytest.fixture(scope="module", autouse=True)
def _warm(world2):
    world2.run(warm_up, timeout=300)
    yield
    world2.close()  # DeepSpeed leaves settings of torch behind, by which other tests' bits would differ


FP16 = "fp16 master=copy on_overflow=skip"


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=2.0**-12)


def moves_of(step, engine):
    """What four windows of one batch move a weight by, and the norms that are reported for them."""
    x, y, _ = next(batches(1, torch.distributed.get_rank()))
    rows = []
    for _ in range(4):
        before = weights_of(engine)["head.weight"]
        norm = step(lambda: sum_of_loss(engine, x, y))
        rows.append((float((weights_of(engine)["head.weight"] - before).norm()), float(norm)))
    return rows


def grow(stage):
    """The same windows stepped by DeepSpeed, and by our stepper: what they move, and the scale at the end."""
    config = deepspeed_config(f"{FP16} scale.init=16 scale.interval=2", stage=stage, hardware=CPU)
    engine = make_engine(config, plain_sgd)

    def step(closure):
        loss, count = closure()
        engine.backward(loss / count)
        engine.step()
        return engine.get_global_grad_norm()

    stepper = DeepSpeedStepper(make_engine(config, plain_sgd), watch=False, hardware=CPU)
    theirs = moves_of(step, engine), engine.optimizer.loss_scale
    return theirs, (
        moves_of(lambda closure: stepper.step(closure).grad_norm, stepper.engine),
        stepper.scale.value.item(),
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_on_which_the_scale_grows_is_a_whole_one(world2, stage):
    """DeepSpeed 0.19.8 divides by the scale that it has just doubled: half a step, and on stage 3 half the norm too.

    It grows after three clean steps where two were asked for. SGD moves alike from one window of the same batch to the
    next, but for the percent by which the gradient changes.
    """
    (theirs, their_scale), (ours, our_scale) = world2.run(grow, stage)[0]
    assert (their_scale, our_scale) == (32.0, 64.0)
    distance, norm = theirs[0]
    assert theirs[1] == pytest.approx((distance, norm), rel=0.01)
    assert theirs[2] == pytest.approx((distance / 2, norm / 2 if stage == 3 else norm), rel=0.01)
    assert ours == [pytest.approx(ours[0], rel=0.01)] * 4


def autocast_alone():
    """DeepSpeed's torch_autocast in fp16: three windows that overflow at 2^16, and a small one."""
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    engine = make_engine({**config, "torch_autocast": {"enabled": True, "dtype": "float16"}}, plain_sgd)
    x, y, _ = next(batches(1, torch.distributed.get_rank()))
    try:
        rows = []
        for factor in (8.0, 8.0, 8.0, 2.0**-10):
            loss, count = sum_of_loss(engine, x, y, factor)
            engine.backward(loss / count)
            engine.step()
            scale = engine.optimizer.torch_autocast_gradscaler.get_scale()
            rows.append((engine.was_step_applied(), scale, float(engine.get_global_grad_norm())))
        stepper = DeepSpeedStepper(engine, watch=False, hardware=CPU)
        reports = [stepper.step(lambda: sum_of_loss(engine, x, y, 8.0)) for _ in range(6)]
        small = stepper.step(lambda: sum_of_loss(engine, x, y, 2.0**-10))
        with pytest.raises(HalfstepError, match="built after one with torch_autocast"):
            make_stepper("bf16 master=copy", 2)
    finally:
        deepspeed.runtime.torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    return rows, [(report.applied, report.scale) for report in reports], small.grad_norm


def test_autocast_in_fp16_gets_a_scale_that_falls(world2):
    """torch's scaler never sees an overflow, which DeepSpeed drops before, and the norm is that of scaled gradients."""
    rows, ours, norm = world2.run(autocast_alone)[0]
    assert [row[:2] for row in rows] == [(False, 2.0**16)] * 3 + [(True, 2.0**16)]
    assert rows[-1][2] == pytest.approx(norm * 2.0**16, rel=0.1)  # of a mean of means, where ours is of all samples
    assert ours[0] == (False, 2.0**16)
    assert ours[-1][0]
    assert [scale for _, scale in ours] == sorted((scale for _, scale in ours), reverse=True)


def run_page(page):
    """Its code, with the device that a test machine without cards has."""
    make_engine(deepspeed_config("fp32", hardware=CPU))  # sets what tests set
    namespace = {}
    for block in re.findall(r"^```py\n(.*?)^```", page, re.S | re.M):
        exec(compile(block, "docs/deepspeed.md", "exec"), namespace)
    return repr(namespace["report"])


def test_the_page_runs(world2):
    page = (Path(__file__).parent.parent / "docs" / "deepspeed.md").read_text()
    reports = world2.run(run_page, page)
    assert reports[0] == reports[1]
    assert reports[0].startswith("step 4: loss")
    assert reports[0].endswith("scale 1, applied")


def exhaust():
    stepper = make_stepper(f"{FP16} scale.init=4 scale.floor=2", 2, sinks=[(reports := []).append])
    x, y, _ = next(batches(1, torch.distributed.get_rank()))
    try:
        while len(reports) < 5:
            stepper.step(lambda: sum_of_loss(stepper.engine, x, y, float("inf")))
    except ScaleExhausted as error:
        return len(reports), str(error)


def test_an_exhausted_scale_stops_all_ranks(world2):
    num, message = world2.run(exhaust)[0]
    assert world2.run(exhaust) == [(num, message)] * 2
    assert num == 2
    assert message.startswith(
        "the loss scale at its floor of 2, step 2: the gradient of the model is still not finite."
    )


def resume(folder, stage, policy):
    """Six windows in one go; four, a checkpoint, and two by another engine."""
    rank = torch.distributed.get_rank()

    def run(stepper, windows):
        return [numbers_of(stepper.step(lambda: sum_of_loss(stepper.engine, *window))) for window in windows]  # noqa: B023

    windows = list(batches(6, rank))
    whole = make_stepper(policy, stage)
    expected = run(whole, windows)[4:]
    first = make_stepper(policy, stage)
    run(first, windows[:4])
    first.engine.save_checkpoint(folder, client_state={"halfstep": first.state_dict()})
    second = make_stepper(policy, stage)
    _, client_state = second.engine.load_checkpoint(folder)
    second.load_state_dict(client_state["halfstep"])
    saved_scale = second.engine.optimizer.loss_scale if second.scale.kind == "dynamic" else None
    got = run(second, windows[4:])
    same = [
        torch.equal(a, b)
        for a, b in zip(weights_of(whole.engine).values(), weights_of(second.engine).values(), strict=True)
    ]
    return got == expected, all(same), second.num_steps, saved_scale, got[0][2]


@pytest.mark.parametrize(
    ("stage", "policy"),
    [
        (2, f"{FP16} scale.interval=2"),
        pytest.param(1, "bf16 master=copy", marks=pytest.mark.slow),
        pytest.param(3, "bf16", marks=pytest.mark.slow),
        pytest.param(3, f"{FP16} scale.interval=2", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_from_deepspeeds_checkpoint_to_the_bit(world2, tmp_path, stage, policy):
    for same_numbers, same_weights, num_steps, saved_scale, scale in world2.run(resume, str(tmp_path), stage, policy):
        assert same_numbers
        assert same_weights
        assert num_steps == 6
        assert saved_scale in (None, scale)


def read_back(policy):
    engine = make_engine(deepspeed_config(policy, stage=2, accumulate=3, max_norm=0.5, reduce="bf16", hardware=CPU))
    dtypes = (*engine.get_data_types(), engine.communication_data_type)
    return dtypes, engine.gradient_accumulation_steps(), engine.gradient_clipping(), engine.dynamic_loss_scale_args()


def test_deepspeed_reads_what_the_policy_says(world2):
    scale = "scale.init=256 scale.interval=500 scale.floor=2 scale.hysteresis=3"
    (dtypes, accumulate, max_norm, scaling), _ = world2.run(read_back, f"{FP16} {scale}")
    assert dtypes == (torch.float16, torch.float32, torch.bfloat16)
    assert (accumulate, max_norm) == (3, 0.5)
    assert scaling == {
        "init_scale": 256,
        "scale_window": 500,
        "delayed_shift": 3,
        "consecutive_hysteresis": True,
        "min_scale": 2,
    }


def look_for_autocast():
    """DeepSpeed asks for the state on CUDA, and closes a region that it did not open; here it is told the CPU's."""
    stepper, ask = make_stepper("bf16 master=copy", 2), torch.is_autocast_enabled
    x, _, _ = next(batches(1))
    torch.is_autocast_enabled = lambda device_type="cpu": ask(device_type)
    try:
        with stepper.forward():
            return stepper.engine(x).dtype
    finally:
        torch.is_autocast_enabled = ask


def test_the_region_stays_open_in_the_engine(world2):
    """The last operation is a softmax, which is fp32 in a region, and bf16 over bf16 weights without one."""
    assert world2.run(look_for_autocast) == [torch.float32] * 2


def part():
    """The second rank with another policy, another rate, and another weight: what each of them says."""
    is_odd, messages = torch.distributed.get_rank() == 1, []
    for what in ("policy", "rate", "weight"):
        stepper = make_stepper("bf16 op:tanh=fp32" if is_odd and what == "policy" else "bf16", 2)
        if is_odd and what == "rate":
            stepper.engine.optimizer.param_groups[0]["lr"] = 1.0
        if is_odd and what == "weight":
            stepper.engine.module.head.weight.data[0, 0] += 2.0**-20
        x, y, _ = next(batches(1))
        try:
            stepper.step(lambda: sum_of_loss(stepper.engine, x, y))  # noqa: B023
        except HalfstepError as error:
            messages.append(str(error))
    return messages


def test_ranks_that_differ_are_stopped_together(world2):
    messages, others = world2.run(part)
    assert messages == others
    policy, rate, weight = messages
    assert policy.startswith("rank 1 has the policy 'bf16 op:tanh=fp32', rank 0 'bf16'")
    assert rate.startswith("rank 1 sets lr of parameter group 0 to 1.0, rank 0 to 0.015625")
    assert weight.startswith("rank 1 holds parameter head.weight with checksum")


def log(folder):
    stepper = make_stepper(f"{FP16} scale.init=16", 2, watch=True, log=folder, accumulate=2)
    for batch in batches(24, torch.distributed.get_rank()):
        stepper.step(lambda: sum_of_loss(stepper.engine, *batch[:2]))  # noqa: B023
    stepper.close()


def test_it_is_watched_as_any_run(world2, tmp_path):
    world2.run(log, str(tmp_path))
    for rank in range(2):
        (path,) = tmp_path.glob(f"rank-0000{rank}.jsonl")
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [entry for entry in entries if entry["kind"] == "step"]
        assert [entry["step"] for entry in steps] == list(range(1, 13))


def misuse():
    """The errors of a stepper over engines that it cannot drive, and of calls that it cannot do."""
    messages = []

    def collect(call):
        try:
            call()
        except HalfstepError as error:
            messages.append(str(error))

    plain = deepspeed_config("bf16 master=copy", stage=2, hardware=CPU)
    for change in (
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
        {"zero_optimization": {"stage": 0}, "data_types": {}},
        {"gradient_allreduce_op": "sum"},
    ):
        engine = make_engine({**plain, **change})
        collect(lambda: DeepSpeedStepper(engine, watch=False, hardware=CPU))  # noqa: B023
    collect(lambda: DeepSpeedStepper(engine.module, watch=False, hardware=CPU))
    stepper = make_stepper("bf16", 2, accumulate=2)
    x, y, _ = next(batches(1, torch.distributed.get_rank()))
    assert stepper.flush() is None
    assert stepper.step(lambda: sum_of_loss(stepper.engine, x, y)) is None
    collect(stepper.flush)
    collect(stepper.state_dict)
    collect(lambda: stepper.load_state_dict({"num_steps": 3}))
    # As the first of them says: a micro-batch that weighs nothing fills the window, and changes nothing of it.
    report = stepper.step(lambda: (0 * sum_of_loss(stepper.engine, x, y)[0], 0))
    other = make_stepper("bf16", 2)
    expected = other.step(lambda: sum_of_loss(other.engine, x, y))
    return messages, numbers_of(report), numbers_of(expected)


def test_what_it_cannot_do_is_refused(world2):
    messages, report, expected = world2.run(misuse)[1]
    whats = [message.partition(":")[0] for message in messages]
    assert whats == [
        "a DeepSpeed engine with bf16.check_grad_overflow=false",
        "a DeepSpeed engine with zero_optimization.stage=0",
        "a DeepSpeed engine with gradient_allreduce_op=sum",
        "a DeepSpeedStepper over a Net",
        "flush() after 1 of 2 micro-batches",
        "the state after 1 of 2 micro-batches",
        "a state without the keys of DeepSpeedStepper.state_dict()",
    ]
    assert report == expected
