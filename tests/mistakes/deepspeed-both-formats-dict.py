import deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "min_loss_scale": 1},
    "bf16": {"enabled": True},  # HS174
    "zero_optimization": {"stage": 2},
}


def start(model, args):
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, config=CONFIG)
    return engine


def train(engine, loader):
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
