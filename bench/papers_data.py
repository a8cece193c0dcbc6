"""How do the papers' images travel in few megabytes? As lossless WebP tiles in a zip, and back to the same .npz.

    python bench/papers_data.py pack OUT FILE.npz ...        writes OUT/FILE.images.zip
    python bench/papers_data.py unpack OUT FILE.images.zip ...   writes OUT/FILE.npz, the same arrays

It needs Pillow. Whatever is not an image (labels, places in the whole split) is stored beside the tiles.
"""

from __future__ import annotations

import argparse
import io
import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ROW, TALLEST = 100, 16_000
"""Images side by side in a tile, and the most pixels of a tile's height that WebP allows, about."""
SUFFIX = ".images.zip"
Images = NDArray[np.uint8]


def _tiles(images: Images) -> Iterable[Images]:
    height, width = images.shape[1:3]
    most = ROW * (TALLEST // height)
    for first in range(0, len(images), most):
        some = images[first : first + most]
        padding = np.zeros((-len(some) % ROW, *some.shape[1:]), np.uint8)
        rows = np.concatenate([some, padding]).reshape(-1, ROW, *some.shape[1:])
        yield rows.swapaxes(1, 2).reshape(len(rows) * height, ROW * width, *some.shape[3:])


def pack(file: Path, out: Path) -> Path:
    arrays = dict(np.load(file, allow_pickle=False))
    names = [name for name, array in arrays.items() if array.ndim >= 3 and array.dtype == np.uint8]
    path = out / f"{file.stem}{SUFFIX}"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("shapes.json", json.dumps({name: arrays[name].shape for name in names}))
        rest = io.BytesIO()
        np.savez_compressed(rest, **{name: array for name, array in arrays.items() if name not in names})
        archive.writestr("rest.npz", rest.getvalue())
        for name in names:
            for index, tile in enumerate(_tiles(arrays[name])):
                held = io.BytesIO()
                Image.fromarray(tile).save(held, "webp", lossless=True, quality=80, method=4, exact=True)
                archive.writestr(f"{name}-{index:03}.webp", held.getvalue())
    return path


def unpack(file: Path, out: Path) -> Path:
    with zipfile.ZipFile(file) as archive:
        shapes: dict[str, list[int]] = json.loads(archive.read("shapes.json"))
        arrays: dict[str, Any] = dict(np.load(io.BytesIO(archive.read("rest.npz")), allow_pickle=False))
        for name, shape in shapes.items():
            tiles = sorted(each for each in archive.namelist() if each.startswith(f"{name}-"))
            arrays[name] = np.concatenate([_images(archive.read(tile), shape) for tile in tiles])[: shape[0]]
    path = out / f"{file.name.removesuffix(SUFFIX)}.npz"
    np.savez(path, **arrays)
    return path


def _images(tile: bytes, shape: list[int]) -> Images:
    _, height, width, *channels = shape
    picture = Image.open(io.BytesIO(tile)).convert("RGB")
    pixels = np.asarray(picture) if channels else np.asarray(picture)[..., 0]
    rows = pixels.reshape(-1, height, ROW, width, *channels).swapaxes(1, 2)
    return rows.reshape(-1, height, width, *channels)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("do", choices=["pack", "unpack"])
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for file in arguments.files:
        made = {"pack": pack, "unpack": unpack}[arguments.do](file, arguments.out)
        print(f"{made}: {made.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
