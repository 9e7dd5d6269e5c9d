import torch
from torch import nn


class Warp(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, image, flow):
        ctx.save_for_backward(image, flow)
        return nn.functional.grid_sample(image, flow, align_corners=False)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        image, flow = ctx.saved_tensors
        with torch.enable_grad():
            image = image.detach().requires_grad_()
            out = nn.functional.grid_sample(image, flow, align_corners=False)
        return torch.autograd.grad(out, image, grad)[0], None


@torch.inference_mode()
def stabilise(frames, flows):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return Warp.apply(frames.cuda(), flows.cuda())
