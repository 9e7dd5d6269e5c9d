"""What a plan is built from: workloads, classes, Transformers and timm; and batches that get another size."""

import collections
import dataclasses
import sys
import textwrap
import types

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import AdamW

from halfstep.errors import HalfstepError
from halfstep.plan.bare_model import DEFAULT_BATCH_SIZE, output_loss
from halfstep.plan.build import build, mapped, resized, tensors_of
from halfstep.plan.fake import FakeDevice
from halfstep.plan.fake_step import fake_step
from halfstep.plan.subject import Subject
from halfstep.plan.target import target_of

NETS = """
    import torch
    from torch import nn
    from halfstep.workload import Workload

    class Net(nn.Module):
        def __init__(self, width=6):
            super().__init__()
            self.inner = nn.Linear(4, width)
        def forward(self, x, scale=None):
            y = self.inner(x)
            return y if scale is None else y * scale[:, None]

    class Example(Net):
        def example_batch(self, batch_size):
            return {"x": torch.randn(batch_size, 4), "scale": torch.ones(batch_size)}

    class Needs(nn.Module):
        def __init__(self, width, *, depth):
            super().__init__()

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            raise RuntimeError("no weights here")

    class Frozen(nn.Module):
        pass

    def workload(seed):
        return Workload(Net(), [torch.randn(3, 4)], lambda model, x: model(x).sum(), torch.optim.AdamW)

    def other(seed):
        return Net()

    number = 3
"""


@pytest.fixture
def nets(tmp_path):
    file = tmp_path / "nets.py"
    file.write_text(textwrap.dedent(NETS))
    return file


def refused(subject):
    with pytest.raises(HalfstepError) as error:
        build(subject)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- workloads and classes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["mlp", "{}", "{}:workload"])
def test_a_workload_comes_as_everywhere_and_nothing_is_assumed(spec, nets):
    assumed = []
    workload = build(Subject(spec.format(nets)), assumed)
    assert assumed == []
    assert callable(workload.loss)


def test_a_class_is_constructed_with_its_defaults_and_gets_the_inputs_that_are_given(nets):
    assumed = []
    workload = build(Subject(f"{nets}:Net", 5, "4, 1"), assumed)
    (batch,) = workload.batches
    assert [tuple(tensor.shape) for tensor in batch] == [(5, 4), (5, 1)]
    assert not any(tensor.any() for tensor in batch)  # values that every embedding and every class has
    assert isinstance(workload.optimizer(workload.model.parameters()), AdamW)
    assert assumed == [
        "The batch is 5 x 4, 1, as given.",
        "The loss is what the model returns as loss, or else a number that it returns, or else the mean square of its "
        "first output in fp32.",
        "The optimizer is torch.optim.AdamW in its default form.",
    ]


def test_a_class_can_draw_its_own_batch(nets):
    assumed = []
    workload = build(Subject(f"{nets}:Example"), assumed)
    (batch,) = workload.batches
    assert batch["x"].shape == (DEFAULT_BATCH_SIZE, 4)
    assert assumed[0] == f"A micro-batch of {DEFAULT_BATCH_SIZE} samples is assumed, since none was given."
    assert f"example_batch({DEFAULT_BATCH_SIZE})" in assumed[1]
    assert workload.loss(workload.model, batch).dim() == 0


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("Net", None, "nothing says what the model takes. Give the inputs of one sample"),
        ("Needs", "4", "its constructor takes (width, *, depth), and a plan calls it without arguments"),
        ("Broken", "4", "RuntimeError: no weights here. Correct that line."),
        ("Frozen", "4", "none of its parameters requires a gradient"),
        ("workload", "4", "a workload draws its own batches"),
        ("other", None, "it returned a value of type Net"),
        ("number", None, "number is of type int, not a function"),
        ("Missing", None, "the file has no function 'Missing'"),
    ],
)
def test_what_is_no_workload_and_no_class_that_can_be_made_is_refused(name, inputs, message, nets):
    assert message in refused(Subject(f"{nets}:{name}", None, inputs))


def test_a_file_is_executed_once(nets, monkeypatch):
    nets.write_text(nets.read_text() + "\nimport sys\nsys.num_runs += 1\n")
    monkeypatch.setattr(sys, "num_runs", 0, raising=False)
    build(Subject(f"{nets}:workload"))
    assert sys.num_runs == 1
    build(Subject(f"{nets}:Example"))
    assert sys.num_runs == 2


def test_a_class_plans_with_the_bytes_of_its_shapes(nets):
    trace = fake_step(Subject(f"{nets}:Example", 16), "fp32", target_of("cpu"))
    held = trace.at(0).components
    weights = 4 * (4 * 6 + 6)
    assert held["weights"] == weights
    assert held["optimizer states"] == 2 * weights + 2 * 4  # and a step counter for each of two parameters
    assert sum(s.nbytes for s in trace.storages if s.component == "inputs") == 4 * (16 * 4 + 16)


# --- losses of a bare model ----------------------------------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, *args):
        return self.output


LOGITS, LOSS = torch.full((2, 3), 3.0), torch.tensor(7.0)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (LOGITS, 9.0),
        (LOGITS.bfloat16(), 9.0),
        ((LOGITS, LOSS), 7.0),
        ({"logits": LOGITS, "loss": LOSS}, 7.0),
        ({"logits": LOGITS, "loss": None}, 9.0),
        (types.SimpleNamespace(loss=LOSS, logits=LOGITS), 7.0),
        ([torch.zeros(2, dtype=torch.long), [LOGITS]], 9.0),
    ],
)
def test_the_loss_of_an_output_is_its_own_or_the_mean_square(output, expected):
    loss = output_loss(Returns(output), (LOGITS,))
    assert loss.item() == expected
    assert loss.dtype == torch.float32


def test_an_output_without_floats_has_no_loss():
    with pytest.raises(HalfstepError, match="no tensor of floats"):
        output_loss(Returns(torch.zeros(3, dtype=torch.long)), LOGITS)


# --- Transformers and timm -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture
def configuration(transformers, tmp_path):
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 20, "vocab_size": 30}
    transformers.GPT2Config(**sizes, architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("form", ["transformers:{}", "transformers:{}/config.json", "{}/config.json"])
def test_a_configuration_is_enough(form, configuration):
    assumed = []
    with FakeDevice(target_of()).building():
        workload = build(Subject(form.format(configuration), 2), assumed)
    (batch,) = workload.batches
    assert type(workload.model).__name__ == "GPT2LMHeadModel"
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {"input_ids": (2, 20), "labels": (2, 20)}
    assert "A sample is 20 tokens without padding." in assumed
    assert "The loss is the model's own, of a label for each token." in assumed
    assert any("use_cache=False" in line for line in assumed)
    assert workload.model.config.use_cache is False


def test_a_transformer_plans_with_its_own_loss(configuration):
    trace = fake_step(Subject(f"transformers:{configuration}", 2), "bf16", target_of())
    assert trace.num_parameters == 30 * 8 + 20 * 8 + 12 * 8 * 8 + 13 * 8 + 2 * 8
    logits = [s for s in trace.storages if s.nbytes == 4 * 2 * 20 * 30 and s.phase == "forward"]
    assert logits  # in fp32, for the model's own cross entropy


def test_a_class_of_transformers_builds_without_memory_and_with_the_labels_of_its_head(transformers):
    with FakeDevice(target_of()).building():
        workload = build(Subject("transformers:ViTForImageClassification", 3))
    (batch,) = workload.batches
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "pixel_values": (3, 3, 224, 224),
        "labels": (3,),
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("transformers:gpt2", "downloads nothing. Name a class (GPT2LMHeadModel)"),
        ("transformers:meta-llama/Llama-2-7b", "downloads nothing"),
        ("transformers:GPT2LMHeadModle", "GPT2LMHeadModel"),
        ("transformers:AutoModel", "AutoModel is not a model with a configuration of its own"),
        ("transformers:nowhere/config.json", "there is no config.json in nowhere"),
    ],
)
def test_what_would_need_a_download_is_refused(spec, message, transformers):
    assert message in refused(Subject(spec))


def test_a_configuration_without_a_class_is_refused(configuration):
    file = configuration / "config.json"
    file.write_text(file.read_text().replace('"GPT2LMHeadModel"', ""))
    assert "does not name its class" in refused(Subject(str(file)))


class Classifier(nn.Module):
    default_cfg, num_classes = {"input_size": (3, 8, 8)}, 10

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, 10)

    def forward(self, x):
        return self.head(x.flatten(1))


@pytest.fixture
def timm(monkeypatch):
    """What a plan calls of timm, which cannot be installed beside every torch."""
    names = {"small": Classifier}
    stand_in = types.ModuleType("timm")
    stand_in.list_models, stand_in.is_model = lambda: list(names), names.__contains__
    stand_in.create_model = lambda name, pretrained: names[name]()
    monkeypatch.setitem(sys.modules, "timm", stand_in)


@pytest.mark.parametrize(("inputs", "shape"), [(None, (3, 8, 8)), ("3x4x16", (3, 4, 16))])
def test_a_timm_model_classifies_images_of_its_size(timm, inputs, shape):
    assumed = []
    workload = build(Subject("timm:small", 4, inputs), assumed)
    ((images, labels),) = workload.batches
    assert images.shape == (4, *shape)
    images += torch.randn(4, *shape)
    logits = workload.model(images)
    expected = nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(workload.loss(workload.model, (images, labels)), expected)
    assert "The loss is the cross entropy of 10 classes." in assumed


def test_a_timm_name_that_is_not_known_gets_the_nearest(timm):
    assert "Use small." in refused(Subject("timm:smal"))
    assert "it is on the hub" in refused(Subject("timm:hf_hub:timm/small"))


def test_a_library_that_cannot_be_imported_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert refused(Subject("timm:resnet50")).endswith("timm cannot be imported. Run: pip install timm")


def test_a_library_is_imported_offline_and_one_that_does_not_fit_says_so(tmp_path, monkeypatch):
    (tmp_path / "timm.py").write_text("import os\nraise RuntimeError('offline ' + os.environ['HF_HUB_OFFLINE'])\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    assert "timm cannot be imported (RuntimeError: offline 1). Install a timm that fits" in refused(Subject("timm:any"))


# --- batches -------------------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str


def shapes(batch):
    return mapped(batch, lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf)


X = torch.randn(4, 3)
KEPT = torch.randn(7, 4)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, (9, 3)),
        ((X, torch.zeros(4)), ((9, 3), (9,))),
        ([X, 4, "name", None], [(9, 3), 4, "name", None]),
        (Pair(X, KEPT), Pair((9, 3), (7, 4))),
        ({"x": X, "count": torch.tensor(4), "table": KEPT}, {"x": (9, 3), "count": (), "table": (7, 4)}),
        (collections.UserDict(x=X), collections.UserDict(x=(9, 3))),
        (Record(X, "a"), Record((9, 3), "a")),
        ((X, ["a", "b", "c", "d"]), ((9, 3), list("abcdabcda"))),
        ((X, [KEPT, KEPT[:2], KEPT[:3], KEPT[:6]]), ((9, 3), [(7, 4), (2, 4), (3, 4), (6, 4)] * 2 + [(7, 4)])),
        ((X, [{"box": KEPT}] * 4), ((9, 3), [{"box": (7, 4)}] * 9)),
    ],
)
def test_what_counts_samples_gets_as_many_as_are_planned_for(batch, expected):
    before = shapes(batch)
    changed = resized(batch, 4, 9)
    assert type(changed) is type(batch)
    assert shapes(changed) == expected
    assert shapes(batch) == before


def test_a_batch_of_the_size_that_is_planned_for_stays_as_it_is():
    packed = pack_padded_sequence(torch.randn(4, 5, 2), [5, 4, 2, 1], batch_first=True)
    assert resized(packed, 5, 5) is packed


def test_a_resized_tensor_keeps_its_format_order_and_gradient():
    images = torch.zeros(2, 3, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    changed = resized(images, 2, 6)
    assert (changed.dtype, changed.requires_grad, changed.shape) == (torch.float64, True, (6, 3, 4, 5))
    assert changed.is_contiguous(memory_format=torch.channels_last)
    assert resized(torch.zeros(2, 3, 4, 5), 2, 6).is_contiguous()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (pack_padded_sequence(torch.randn(4, 5, 2), [5, 4, 2, 1], batch_first=True), "packed sequence"),
        (torch.eye(4).to_sparse(), "sparse or nested tensor"),
        ({"x": KEPT, "count": 4}, "nothing in the workload's batch counts its 4 samples"),
        ([KEPT, KEPT[:2]], "nothing in the workload's batch counts its 4 samples"),
    ],
)
def test_a_batch_that_cannot_be_resized_is_refused(batch, message):
    with pytest.raises(HalfstepError, match=message) as error:
        resized(batch, 4, 9)
    assert "Let the workload draw batches of the size" in error.value.fix


def test_tensors_are_found_in_every_container():
    found = tensors_of({"a": [X, (KEPT, "text")], "b": Record(X[0], "n"), "c": 3})
    assert [id(tensor) for tensor in found[:2]] == [id(X), id(KEPT)]
    assert len(found) == 3
