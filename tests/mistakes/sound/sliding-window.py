import torch


@torch.inference_mode()
def segment(unet, volume, windows, importance):
    logits = torch.zeros((4, *volume.shape[1:]), dtype=torch.half, device="cuda")
    weight = torch.zeros(volume.shape[1:], dtype=torch.half, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        for window in windows:
            answer = unet(volume[window][None].cuda())[0]
            logits[window] += answer * importance
            weight[window[1:]] += importance
    return logits / weight
