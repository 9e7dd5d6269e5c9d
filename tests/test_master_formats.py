"""Master weights: which parameters and states are 16-bit and which fp32, ties, groups, and what is refused."""

import math

import pytest
import torch
from reference.master_net import Net, batches, build, exact, train, watch_gradients
from torch import nn
from torch.nn.utils import prune

from halfstep import HalfstepError, Policy, Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")


def test_matrices_are_16_bit_and_vectors_fp32():
    model, stepper = build("bf16 master=split16")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.bfloat16 if parameter.dim() > 1 else torch.float32), name
        assert parameter.requires_grad
    train(stepper, model, batches(1))
    for parameter, state in stepper.optimizer.state.items():
        assert {value.dtype for value in state.values()} == {torch.float32}, parameter.shape


def test_a_16_bit_embedding_hands_on_fp32_and_sums_its_rows_in_fp32():
    """4,096 gradients of 2^-10 for one row: torch's own CPU kernel stops at 256 of them in bf16."""
    model, stepper = build("bf16 master=split16", model=nn.Embedding(4, 8))
    index = torch.zeros(4096, dtype=torch.long)
    seen = watch_gradients(stepper)
    outputs = []
    stepper.step(lambda: outputs.append(model(index)) or outputs[0].mean(dim=0).sum())
    assert outputs[0].dtype == torch.float32
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(seen["weight"][0], torch.ones(8))


@pytest.mark.parametrize("layer", ["norm", "rnn", "bag", "parametrised", "weight_norm", "pruned", "conv"])
def test_what_stays_fp32(layer):
    """Norms compute in fp32, recurrent kernels take one format, and a source of a weight is no weight."""
    model = {
        "norm": lambda: nn.LayerNorm((4, 6)),
        "rnn": lambda: nn.GRU(6, 5, batch_first=True),
        "bag": lambda: nn.EmbeddingBag(10, 6),
        "parametrised": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)),
        "pruned": lambda: prune.random_unstructured(nn.Linear(6, 5), "weight", 0.5),
        "conv": lambda: nn.utils.spectral_norm(nn.Conv1d(4, 5, 3)),
        "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)),
    }[layer]()
    x = torch.zeros(3, 4, dtype=torch.long) if layer == "bag" else torch.randn(3, 4, 6)
    _, stepper = build("bf16 master=split16", model=model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    def loss():
        output = model(x)
        return (output[0] if isinstance(output, tuple) else output).float().square().mean()

    assert stepper.step(loss).applied


def test_a_module_rule_keeps_its_weights_fp32():
    model, stepper = build("bf16 master=split16 module:up=fp32")
    assert model.up.weight.dtype == torch.float32
    assert model.down.weight.dtype == torch.bfloat16
    train(stepper, model, batches(3))
    assert all(weight.isfinite().all() for weight in exact(stepper).values())


@pytest.mark.parametrize("module", ["embed", "head"])
def test_a_weight_shared_with_a_module_in_fp32_is_fp32(module):
    model, _ = build(f"bf16 master=split16 module:{module}=fp32")
    assert model.embed.weight.dtype == torch.float32
    assert model.head.weight is model.embed.weight


def test_tied_weights_stay_tied():
    model, stepper = build("bf16 master=split16")
    train(stepper, model, batches(5))
    assert model.head.weight is model.embed.weight
    assert [name for name, _ in stepper.weights() if "head" in name] == []
    state = stepper.fp32_state_dict()
    assert torch.equal(state["head.weight"], state["embed.weight"])


def test_16_bit_weights_of_the_model_are_taken_as_they_are():
    model = Net().bfloat16()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    _, stepper = build("bf16 master=split16", model=model)
    for name, weight in stepper.weights():
        assert torch.equal(weight, before[name].float()), name
    train(stepper, model, batches(2))


def test_16_bit_states_that_an_optimizer_made_before_become_fp32():
    model = Net().bfloat16()
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    assert optimizer.state[model.up.weight]["sum"].dtype == torch.bfloat16
    stepper = Stepper(model, optimizer, "bf16 master=split16")
    assert optimizer.state[model.up.weight]["sum"].dtype == torch.float32
    assert (optimizer.state[model.up.weight]["sum"] == 0.5).all()
    train(stepper, model, batches(1))


def test_frozen_parameters_outside_the_optimizer_are_left_alone():
    model = Net()
    model.up.weight.requires_grad_(False)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stepper = Stepper(model, torch.optim.SGD(trainable, 0.1), "bf16 master=copy")
    assert model.up.weight.dtype == torch.float32
    train(stepper, model, batches(2))


def test_a_group_that_is_added_is_narrowed_with_the_next_window():
    model = Net()
    optimizer = torch.optim.AdamW([{"params": [model.embed.weight]}], lr=1e-2)
    stepper = Stepper(model, optimizer, "bf16 master=split16")
    train(stepper, model, batches(2))
    assert model.up.weight.dtype == torch.float32
    optimizer.add_param_group({"params": list(model.up.parameters()) + list(model.down.parameters()), "lr": 1e-3})
    train(stepper, model, batches(1))
    assert model.up.weight.dtype == torch.bfloat16
    assert optimizer.state[model.up.weight]["exp_avg"].dtype == torch.float32
    before = exact(stepper)
    train(stepper, model, batches(2))
    assert not torch.equal(exact(stepper)["up.weight"], before["up.weight"])


def test_a_fp16_weight_beyond_its_range_is_refused_by_name():
    model = Net()
    with torch.no_grad():
        model.down.weight[0, 0] = 70000.0
    with pytest.raises(HalfstepError, match=r"down\.weight with a weight of 70000.*65504.*module:down=fp32"):
        build("fp16 master=split16", model=model)
    with torch.no_grad():
        model.down.weight[0, 0] = math.nan
    with pytest.raises(HalfstepError, match=r"down\.weight with a weight of nan"):
        build("fp16 master=split16", model=model)


def test_16_bit_weights_without_a_layout_are_refused_with_the_cure():
    with pytest.raises(HalfstepError, match=r"embed\.weight .*16 bit loses.*master=split16"):
        build("bf16", model=Net().bfloat16())


def test_a_layout_needs_a_16_bit_policy():
    with pytest.raises(HalfstepError, match="keeps 16-bit weights in the model"):
        Policy.parse("fp32 master=split16")
