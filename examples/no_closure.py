"""The same step in a loop that cannot pass a closure, stopped and resumed in the middle of a window."""

import io

import torch
import torch.nn.functional as F

import halfstep


def build():
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, halfstep.Stepper(model, optimizer, "bf16", accumulate=3)


def train(model, stepper, batches):
    for x, y in batches:
        with stepper.forward():
            loss = F.mse_loss(model(x).float(), y)
        stepper.backward(loss)


torch.manual_seed(1)
batches = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(12)]

straight, _, stepper = build()
train(straight, stepper, batches)

model, optimizer, stepper = build()
train(model, stepper, batches[:7])  # one micro-batch into the third window
checkpoint = io.BytesIO()
torch.save([part.state_dict() for part in (model, optimizer, stepper)], checkpoint)

model, optimizer, stepper = build()
checkpoint.seek(0)
for part, state in zip((model, optimizer, stepper), torch.load(checkpoint), strict=True):
    part.load_state_dict(state)
train(model, stepper, batches[7:])
print("the same bits:", torch.equal(model.weight, straight.weight))
