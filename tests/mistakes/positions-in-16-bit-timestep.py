import torch
from torch import nn
import torch.nn.functional as F

WEIGHT_DTYPE = torch.bfloat16


def denoising_loss(unet, latents, noise_levels):
    timesteps = torch.randint(0, 1000, (latents.shape[0],), device=latents.device)
    noise = torch.randn_like(latents)
    level = noise_levels[timesteps].view(-1, 1, 1, 1)
    noisy = (1 - level) * latents + level * noise
    with torch.autocast("cuda", dtype=WEIGHT_DTYPE):
        predicted = unet(noisy, timesteps.to(WEIGHT_DTYPE))  # HS150
    return F.mse_loss(predicted.float(), noise)


def train(unet: nn.Module, loader, noise_levels) -> None:
    unet = unet.cuda()
    adam = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    for latents in loader:
        adam.zero_grad(set_to_none=True)
        denoising_loss(unet, latents.cuda(), noise_levels.cuda()).backward()
        adam.step()
