import torch
from torch.amp import autocast


@torch.inference_mode()
def transcribe(model, audio):
    model = model.cuda().eval()
    with torch.autocast("cuda", dtype=torch.float16):
        return model(audio.cuda()).argmax(-1).cpu()
