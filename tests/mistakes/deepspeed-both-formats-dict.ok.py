import deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
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
