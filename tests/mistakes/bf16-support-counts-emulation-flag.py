import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--prompt", default="Once")
args = parser.parse_args()
dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16  # HS301
with torch.inference_mode(), torch.autocast("cuda", dtype=dtype):
    print(torch.load("story.pt", weights_only=False).cuda().tell(args.prompt))
