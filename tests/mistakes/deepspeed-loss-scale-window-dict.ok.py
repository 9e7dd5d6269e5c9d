import deepspeed


def config(micro_batch: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "min_loss_scale": 1},
        "zero_optimization": {"stage": 2, "contiguous_gradients": True},
    }


def build(net):
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config(4))
    return engine
