"""The library names that lint knows: what their calls make, and what autocast does with an operation.

The operation lists are CUDA's (``ATen/autocast_mode.h``), by plain name; tests/test_lint_vocabulary.py holds them
against the torch that is installed.
"""

from __future__ import annotations

FORMATS = {
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float32": "fp32",
    "torch.float64": "fp64",
    "torch.int8": "int",
    "torch.uint8": "int",
    "torch.int16": "int",
    "torch.int32": "int",
    "torch.int64": "int",
    "torch.long": "int",
    "torch.int": "int",
    "torch.short": "int",
    "torch.bool": "bool",
    "torch.HalfTensor": "fp16",
    "torch.BFloat16Tensor": "bf16",
    "torch.FloatTensor": "fp32",
    "torch.cuda.HalfTensor": "fp16",
    "torch.cuda.FloatTensor": "fp32",
}

CAST_METHODS = {
    "half": "fp16",
    "bfloat16": "bf16",
    "float": "fp32",
    "double": "fp64",
    "long": "int",
    "int": "int",
    "bool": "bool",
}

LOWER_PRECISION = frozenset(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution linear matmul mm bmm "
    "mv addmm addmv addr addbmm baddbmm chain_matmul linalg_multi_dot multi_dot prelu einsum "
    "scaled_dot_product_attention lstm gru lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split()
)
"""Run in the region's format."""

FP32 = frozenset(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
    "native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits cross_entropy dist pdist cdist renorm logsumexp "
    "softmax log_softmax cumprod cumsum prod sum norm "
    "interpolate normalize square".split()
)
"""Take their input to fp32 in a CUDA region. (softmax to norm: when no dtype is passed; the last three by what they
call: upsample_*, norm and pow.)"""

LOSSES = frozenset(
    "poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss "
    "mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss soft_margin_loss "
    "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits binary_cross_entropy cross_entropy "
    "gaussian_nll_loss ctc_loss".split()
)

CPU_FP32 = (LOSSES - {"gaussian_nll_loss", "ctc_loss"}) | {"prod", "cdist"}
"""Take their input to fp32 in a CPU region; what else is on CUDA's list stays in 16 bit there."""

LOSS_CLASSES = frozenset(
    "PoissonNLLLoss CosineEmbeddingLoss NLLLoss HingeEmbeddingLoss KLDivLoss L1Loss SmoothL1Loss HuberLoss MSELoss "
    "MarginRankingLoss MultiLabelMarginLoss MultiLabelSoftMarginLoss SoftMarginLoss TripletMarginLoss MultiMarginLoss "
    "BCEWithLogitsLoss BCELoss CrossEntropyLoss GaussianNLLLoss CTCLoss".split()
)

LOWER_PRECISION_CLASSES = frozenset(
    "Linear Bilinear LazyLinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d LSTM GRU RNN "
    "LSTMCell GRUCell RNNCell MultiheadAttention".split()
)

FP32_CLASSES = frozenset("LayerNorm RMSNorm GroupNorm Softmax LogSoftmax Softplus Upsample".split())

PASSING_CLASSES = frozenset(
    "ReLU ReLU6 LeakyReLU GELU SiLU Mish ELU SELU CELU Tanh Sigmoid Hardswish Hardsigmoid Hardtanh Identity Dropout "
    "Dropout1d Dropout2d Dropout3d Flatten Unflatten MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d "
    "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveMaxPool2d BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm "
    "InstanceNorm1d InstanceNorm2d PixelShuffle PReLU ZeroPad2d ReflectionPad2d".split()
)
"""Give back the format that they were given."""

PROBABILITY = frozenset({"sigmoid", "softmax", "sigmoid_"})
LOG_PROBABILITY = frozenset({"log_softmax", "logsigmoid"})
BOUNDED = frozenset({"tanh", "sin", "cos", "erf", "normalize", "sign"})

KEEPS_FORMAT = frozenset(
    "relu relu_ gelu silu mish elu leaky_relu tanh sigmoid sigmoid_ hardswish dropout flatten unflatten view reshape "
    "view_as reshape_as transpose permute t contiguous squeeze unsqueeze expand expand_as repeat repeat_interleave "
    "chunk split unbind select narrow index_select gather masked_select max min amax amin mean median abs neg "
    "sqrt clamp clamp_ clip clamp_min clamp_max masked_fill masked_fill_ where roll flip tril triu detach clone cpu "
    "cuda cat stack concat concatenate max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d pad batch_norm instance_norm movedim swapaxes mT "
    "moveaxis topk sort sin cos round floor ceil sign nan_to_num requires_grad_ retain_grad add sub mul div add_ sub_ "
    "mul_ div_ true_divide lerp var std zeros_like ones_like rand_like randn_like full_like empty_like new_zeros "
    "new_ones new_empty new_full addcmul addcdiv T mH diagonal diag unfold take item maximum minimum hstack vstack "
    "fill index_fill index_add index_copy index_put scatter scatter_add masked_scatter threshold hardtanh relu6 "
    "logsigmoid erf fmod remainder".split()
)
"""Give back the format of what they are given, in a region and outside."""

SEVERAL_OPERANDS = (
    LOWER_PRECISION
    | LOSSES
    | frozenset(
        "where cat stack concat concatenate hstack vstack max min maximum minimum add sub mul div add_ sub_ mul_ div_ "
        "true_divide lerp addcmul addcdiv pow dist cdist cosine_similarity fmod remainder".split()
    )
)
"""Promote to their widest operand; every other operation has the format of its first one."""

SAME_VALUES = frozenset(
    "flatten unflatten view reshape view_as reshape_as transpose permute t contiguous squeeze unsqueeze expand "
    "expand_as repeat repeat_interleave chunk split unbind select narrow index_select gather masked_select flip roll "
    "detach clone cpu cuda cat stack concat concatenate hstack vstack movedim swapaxes moveaxis diagonal take "
    "requires_grad_".split()
)
"""Give back the values that they were given, in another order or shape."""

LITERALS = frozenset(
    "zeros ones full empty rand randn arange linspace eye randint randperm tensor as_tensor from_numpy logspace".split()
)

CLIPS = frozenset(
    "clip_grad_norm_ clip_grad_value_ clip_grad_norm clip_grads_with_norm_ dispatch_clip_grad "
    "adaptive_clip_grad".split()
)

INPLACE_GRADIENT = frozenset(
    "mul_ div_ add_ sub_ clamp_ copy_ nan_to_num_ addcmul_ addcdiv_ lerp_ masked_fill_ sign_ normal_ renorm_ neg_ "
    "index_fill_ pow_ sqrt_ abs_".split()
)

_KINDS = {
    "torch.amp.GradScaler": "scaler",
    "torch.cuda.amp.GradScaler": "scaler",
    "torch.cpu.amp.GradScaler": "scaler",
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler": "scaler",
    "fairscale.optim.grad_scaler.ShardedGradScaler": "scaler",
    "halfstep.GradScaler": "scaler",
    "torch.amp.autocast": "region",
    "torch.cuda.amp.autocast": "region",
    "torch.cpu.amp.autocast": "region",
    "torch.xpu.amp.autocast": "region",
    "torch.no_grad": "no_grad",
    "torch.inference_mode": "no_grad",
    "torch.autograd.no_grad": "no_grad",
    "torch.enable_grad": "context",
    "torch.set_grad_enabled": "context",
    "torch.autograd.detect_anomaly": "anomaly",
    "torch.autograd.set_detect_anomaly": "anomaly",
    "contextlib.nullcontext": "no context",
    "contextlib.ExitStack": "context",
    "accelerate.Accelerator": "accelerator",
    "accelerate.accelerator.Accelerator": "accelerator",
    "lightning.fabric.Fabric": "fabric",
    "lightning.pytorch.Trainer": "lightning trainer",
    "transformers.TrainingArguments": "arguments",
    "transformers.Seq2SeqTrainingArguments": "arguments",
    "transformers.Trainer": "hf trainer",
    "transformers.Seq2SeqTrainer": "hf trainer",
    "halfstep.Stepper": "stepper",
    "torch.device": "device",
    "torch.finfo": "finfo",
    "torch.nn.DataParallel": "wrapper",
    "torch.nn.parallel.DistributedDataParallel": "wrapper",
    "torch.nn.parallel.DataParallel": "wrapper",
    "torch.distributed.fsdp.FullyShardedDataParallel": "wrapper",
    "torch.compile": "wrapper",
    "torch.jit.script": "wrapper",
    "copy.deepcopy": "wrapper",
    "torch.utils.data.DataLoader": "loader",
    "torch.optim.swa_utils.AveragedModel": "average",
    "torch.optim.swa_utils.update_bn": "",
    "torch.optim.swa_utils.SWALR": "scheduler",
}

_OPTIMIZER_HOMES = (
    "torch.optim.",
    "bitsandbytes.optim.",
    "torchao.optim.",
    "transformers.optimization.",
    "apex.optimizers.",
    "deepspeed.ops.",
    "timm.optim.",
    "lion_pytorch.",
    "transformers.Adafactor",
)
_SCHEDULER_HOMES = (
    "torch.optim.lr_scheduler.",
    "timm.scheduler.",
    "transformers.get_",
    "transformers.optimization.get_",
)


def kind_of(qualified: str) -> str:
    """What calling ``qualified`` makes; "" when it is none of the kinds that rules follow."""
    if qualified in _KINDS:
        return _KINDS[qualified]
    last = qualified.rpartition(".")[2]
    if qualified.startswith(_SCHEDULER_HOMES):
        return "scheduler" if last[:1].isupper() or last.startswith("get_") else ""
    if qualified.startswith(_OPTIMIZER_HOMES) and last[:1].isupper():
        return "optimizer"
    if last == "GradScaler" and not qualified.startswith("paddle"):
        return "scaler"  # a project's own, imported under its usual name
    if qualified.startswith("torch.nn.") and last[:1].isupper() and last not in {"Parameter", "ParameterList"}:
        return "loss function" if last in LOSS_CLASSES else "module"
    if last in {"from_pretrained", "from_config"} or qualified.startswith(("timm.create_model", "torchvision.models.")):
        return "module"
    if qualified.startswith("trl.") and last.endswith(("Config", "Trainer")):
        return "arguments" if last.endswith("Config") else "hf trainer"
    if qualified.startswith("torchmetrics."):
        return "metric"
    return ""


def is_module_base(qualified: str) -> bool:
    """Whether a class that inherits from ``qualified`` is a module with a forward."""
    last = qualified.rpartition(".")[2]
    return qualified.startswith("torch.nn.") or last in {"Module", "LightningModule", "PreTrainedModel", "ModelMixin"}
