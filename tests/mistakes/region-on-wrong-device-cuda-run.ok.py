import torch
from torch import autocast, nn


def evaluate(model: nn.Module, loader) -> float:
    model = model.to("cuda").eval()
    right = torch.zeros((), device="cuda", dtype=torch.long)
    seen = 0
    with torch.inference_mode():
        for spectrogram, genre in loader:
            spectrogram, genre = spectrogram.to("cuda"), genre.to("cuda")
            with autocast(device_type="cuda", dtype=torch.bfloat16):
                logits = model(spectrogram)
            right += (logits.argmax(-1) == genre).sum()
            seen += len(genre)
    return right.item() / seen
