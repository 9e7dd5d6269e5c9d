"""The operation lists of lint are those of the torch that is installed."""

import pytest
import torch

from halfstep.lint import vocabulary
from halfstep.lint.vocabulary import kind_of
from halfstep.oplist import cuda_lists


def listed(kind):
    """The plain names that CUDA autocast has on a list."""
    return {name.removeprefix("aten::").partition(".")[0] for name, k in cuda_lists().items() if k == kind}


COMPOSITES = {
    "linear", "lstm", "gru", "multi_dot",  # whose parts are on the list
    "cross_entropy", "interpolate", "normalize", "square",  # log_softmax and nll_loss, upsample_*, norm, pow
}  # fmt: skip


def test_lower_precision_operations_are_on_the_list_of_cuda():
    assert listed("low") >= vocabulary.LOWER_PRECISION - COMPOSITES
    left_out = {name for name in listed("low") if not name.startswith(("_", "scaled_dot_product_"))}
    assert left_out - vocabulary.LOWER_PRECISION == {"linalg_vecdot"}


def test_fp32_operations_are_on_the_list_of_cuda():
    theirs = listed("fp32") | listed("set_dtype")
    assert theirs >= vocabulary.FP32 - COMPOSITES
    inner = ("_", "upsample_", "linalg_")  # reached through others; linalg has no place in a region's arithmetic
    assert {name for name in theirs if not name.startswith(inner)} - vocabulary.FP32 == set()


@pytest.mark.parametrize("name", sorted(vocabulary.LOSS_CLASSES | vocabulary.PASSING_CLASSES))
def test_classes_exist(name):
    assert hasattr(torch.nn, name)


@pytest.mark.parametrize("name", sorted(vocabulary.LOWER_PRECISION_CLASSES | vocabulary.FP32_CLASSES))
def test_computing_classes_exist(name):
    assert hasattr(torch.nn, name)


@pytest.mark.parametrize(("name", "format"), sorted(vocabulary.FORMATS.items()))
def test_formats_are_dtypes(name, format):
    thing = torch
    for part in name.split(".")[1:]:
        thing = getattr(thing, part)
    if isinstance(thing, torch.dtype):
        size = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8, "bool": 1}.get(format)
        assert size is None or thing.itemsize == size


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("torch.amp.GradScaler", "scaler"),
        ("torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler", "scaler"),
        (".utils.GradScaler", "scaler"),
        ("paddle.amp.GradScaler", ""),
        ("sklearn.preprocessing.StandardScaler", ""),
        ("torch.optim.AdamW", "optimizer"),
        ("bitsandbytes.optim.AdamW8bit", "optimizer"),
        ("torch.optim.lr_scheduler.StepLR", "scheduler"),
        ("transformers.get_cosine_schedule_with_warmup", "scheduler"),
        ("torch.nn.Linear", "module"),
        ("torch.nn.CrossEntropyLoss", "loss function"),
        ("torch.nn.Parameter", ""),
        ("transformers.AutoModel.from_pretrained", "module"),
        ("torch.zeros", ""),
    ],
)
def test_kind_of(name, kind):
    assert kind_of(name) == kind


def test_inplace_names_are_methods():
    for name in vocabulary.INPLACE_GRADIENT:
        assert hasattr(torch.Tensor, name), name
