from pathlib import Path

import numpy as np
from PIL import Image


def shrink(folder: Path, scale: float = 0.5) -> None:
    for path in folder.glob("*.jpg"):
        image = Image.open(path)
        half = image.resize((int(image.width * scale), int(image.height * scale)))
        loss = np.mean((np.asarray(image.resize(half.size), np.float32) - np.asarray(half, np.float32)) ** 2)
        half.save(path.with_suffix(".small.jpg"), quality=80)
        print(path.name, 10 * np.log10(255**2 / (loss + 1e-8)))
