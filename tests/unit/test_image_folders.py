"""Folders of images in practice: links, orientation, depth, pages, colours, and files left by operating systems."""

from __future__ import annotations

import json
import logging
import os
import struct
import sys
import tempfile
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from facts import tells
from forked import run
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError

import fedloom
from fedloom.data.federated import FederatedDataset
from fedloom.data.own import Own, OwnClients
from fedloom.data.pack import PackedClient, PackSettings, pack
from fedloom.data.pack.examples import Request
from fedloom.errors import DataError
from fedloom.experiment import of

RNG = np.random.default_rng(0)
TASK: dict[str, Any] = {
    "name": "own",
    "model": {"name": "logistic"},
    "algorithm": {"name": "fedavg", "local": {"steps": 1}},
    "federation": {"rounds": 1, "clients_per_round": 2},
    "runtime": {"workers": 0},
}


def pixels(*shape: int) -> NDArray[np.uint8]:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def folder(root: Path, *shape: int, classes: tuple[str, ...] = ("cat", "dog"), each: int = 8) -> Path:
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(each):
            Image.fromarray(pixels(*shape)).save(root / name / f"{i}.png")
    return root


def packed(source: Path, **request: Any) -> tuple[PackedClient, NDArray[np.uint8]]:
    """Return the result of packing, and all inputs."""
    out = source.with_name(f"{source.name}-packed")
    done = pack(source, out, PackSettings("a", Request(**request)))
    tensors = safetensors.numpy.load_file(out / "shard.safetensors")
    return done, np.concatenate([tensors[f"{split}_x"] for split in ("train", "validation", "test")])


@pytest.fixture
def other_user() -> Iterator[Path]:
    """Create a folder that every user may write to."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user takes root")
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o777)
        yield Path(made)


@contextmanager
def as_other_user() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def opened(source: Path, root: Path, client: str | None = None) -> FederatedDataset:
    dealt = {"scheme": "iid", "clients": 2} if client is None else {"scheme": "natural"}
    section = {"dataset": "folder", "root": str(root), "source": {"path": str(source), "client": client}}
    return fedloom.Federated({**section, "partition": dealt, "held_out_fraction": 0.0}).open()


def refusal(source: Path) -> str:
    with pytest.raises(DataError) as caught:
        packed(source)
    return str(caught.value)


def holds(x: NDArray[np.uint8], image: NDArray[np.uint8]) -> bool:
    return any(np.array_equal(each, image) for each in x)


# --- listing ----------------------------------------------------------------------------------------------------------


def test_a_linked_class_folder_is_read(tmp_path: Path) -> None:
    store = folder(tmp_path / "store", 4, 5, 3)
    (tmp_path / "subset").mkdir()
    for name in ("cat", "dog"):
        (tmp_path / "subset" / name).symlink_to(Path("..") / "store" / name)
    done, x = packed(tmp_path / "subset")
    _, plain = packed(store)
    assert done.card.spec.class_names == ("cat", "dog")
    assert np.array_equal(x, plain)


@pytest.mark.parametrize("target", [".", "..", "../.."])
def test_a_link_to_a_parent_folder_is_rejected_and_named(target: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "a" / "pictures", 4, 5)
    (source / "cat" / "again").symlink_to(target)
    assert tells(refusal(source), "again", "link")


def test_links_between_classes_terminate(tmp_path: Path) -> None:
    source = folder(tmp_path / "pictures", 4, 5)
    (source / "cat" / "to-dog").symlink_to("../dog")
    (source / "dog" / "to-cat").symlink_to("../cat")
    assert tells(refusal(source), "to-cat", "link")


def test_an_unreadable_folder_is_reported(other_user: Path) -> None:
    source = folder(other_user / "pictures", 4, 5)
    (source / "cat").chmod(0)
    with as_other_user():
        assert tells(refusal(source), source / "cat", "permission")


def test_files_of_operating_systems_are_skipped(tmp_path: Path) -> None:
    source = folder(tmp_path / "pictures", 4, 5)
    for place in ("__MACOSX/cat", ".ipynb_checkpoints", "cat/@eaDir", "$RECYCLE.BIN"):
        (source / place).mkdir(parents=True)
    for place in (
        ".DS_Store",
        "Thumbs.db",
        "cat/Thumbs.db",
        "cat/desktop.ini",
        "dog/Desktop.ini",
        "dog/ehthumbs.db",
        "dog/Icon\r",
        "__MACOSX/cat/._0.png",
        "cat/._0.png",
        "cat/@eaDir/0.png",
        "$RECYCLE.BIN/0.png",
        ".ipynb_checkpoints/0.png",
    ):
        (source / place).write_bytes(b"no image")
    done, x = packed(source)
    assert (len(x), done.card.spec.class_names) == (16, ("cat", "dog"))


def test_split_folders_are_recognized_beside_system_files(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        folder(tmp_path / "pictures" / split, 4, 5, each=3)
    (tmp_path / "pictures" / "__MACOSX").mkdir()
    done, _ = packed(tmp_path / "pictures")
    assert done.card.division == {"given": True}
    assert done.card.spec.class_names == ("cat", "dog")


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_both_unicode_forms_of_a_class_are_one_class(form: Any, tmp_path: Path) -> None:
    one, other = unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café")
    source = folder(tmp_path / "pictures", 4, 5, classes=(one, other, "bar"))
    done, _ = packed(source)
    assert done.card.spec.class_names == ("bar", one)
    own = Own(kind="pixels", input_shape=(1, 4, 5), classes=(unicodedata.normalize(form, "café"), "bar"))
    card = pack(source, tmp_path / "out", PackSettings("a", Request(own.spec))).card
    assert card.class_counts["train"][0] > card.class_counts["train"][1] > 0
    OwnClients.open([source.with_name(f"{source.name}-packed")]).check(
        own.model_copy(update={"classes": ("bar", other)})
    )
    rows = [f"{i},{(one, other, 'bar')[i % 3]}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["u,label", *rows]), encoding="utf-8")
    table = Own(kind="features", input_shape=(1,), classes=own.classes)
    counts = pack(tmp_path / "t.csv", tmp_path / "table", PackSettings("a", Request(table.spec))).card.class_counts
    assert sum(of_split[0] for of_split in counts.values()) == 40


def test_a_class_in_two_unicode_forms_is_rejected() -> None:
    with pytest.raises(ValidationError, match="caf"):
        Own(kind="pixels", input_shape=(1, 4, 5), classes=("caf\u00e9", "cafe\u0301"))


# --- content of images ------------------------------------------------------------------------------------------------


def test_grey_tiffs_are_rotated_by_their_orientation(tmp_path: Path) -> None:
    for held, back in ((6, 1), (8, -1)):
        for i in range(5):
            image = np.arange(8 * 16, dtype=np.uint8).reshape(8, 16) + np.uint8(10 * i + held)
            tag = Image.Exif()
            tag[0x0112] = held
            path = tmp_path / "pictures" / str(held) / f"{i}.tif"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.ascontiguousarray(np.rot90(image, back))).save(path, exif=tag)
    _, x = packed(tmp_path / "pictures")
    assert x.shape[1:] == (1, 8, 16)
    assert (x.reshape(len(x), -1) == x[:, 0, :1, 0] + np.arange(8 * 16, dtype=np.uint8)).all()


@pytest.mark.parametrize("ending", ["png", "jpg", "tif", "webp"])
def test_images_are_rotated_by_their_orientation(ending: str, tmp_path: Path) -> None:
    upright = np.zeros((8, 16, 3), np.uint8)
    upright[:4] = 255
    back = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),  # displayed rotated by 90 degrees clockwise
        7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }
    for label in ("cat", "dog"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for held, stored in back.items():
            tag = Image.Exif()
            tag[0x0112] = held
            image = upright.copy()
            image[5:, :, 1] = 20 * held + (label == "dog") * 10
            path = tmp_path / "pictures" / label / f"{held}.{ending}"
            Image.fromarray(np.ascontiguousarray(stored(image))).save(path, exif=tag)
    done, x = packed(tmp_path / "pictures")
    assert done.card.spec.input_shape == (3, 8, 16)
    assert x[:, :, :3].min() > 200
    assert x[:, 0, 5:].max() < 60
    assert any(tells(note, 14, "EXIF") for note in done.notes)


def png16(path: Path, values: NDArray[np.uint16], colour: int) -> None:
    """Write a PNG of 16 bits a channel."""
    height, width = values.shape[:2]
    raw = b"".join(b"\0" + values[y].astype(">u2").tobytes() for y in range(height))

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(raw)) + part(b"IEND", b"")
    )


def tiff16(path: Path, values: NDArray[np.uint16]) -> None:
    """Write an RGB TIFF of 16 bits a channel."""
    height, width, _ = values.shape
    data = values.astype("<u2").tobytes()
    depth_at = 8 + 2 + 10 * 12 + 4
    tags = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, 3, depth_at), (259, 3, 1, 1), (262, 3, 1, 2)]
    tags += [(273, 4, 1, depth_at + 6), (277, 3, 1, 3), (278, 3, 1, height), (279, 4, 1, len(data)), (284, 3, 1, 1)]
    fields = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    path.write_bytes(
        b"II*\0\x08\0\0\0" + struct.pack("<H", 10) + fields + bytes(4) + struct.pack("<3H", *[16] * 3) + data
    )


@pytest.mark.parametrize("kind", ["grey", "rgb", "grey-alpha", "rgba", "ppm", "pgm", "tiff", "float", "int"])
def test_images_of_more_than_8_bits_are_rejected(kind: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "pictures", 4, 5)
    at = source / "cat"
    values = RNG.integers(0, 4096, (4, 5, 4)).astype(np.uint16)
    colours = {"grey": (0, 1), "rgb": (2, 3), "grey-alpha": (4, 2), "rgba": (6, 4)}
    if kind in colours:
        colour, channels = colours[kind]
        png16(at / "deep.png", values[:, :, :channels], colour)
    elif kind in ("ppm", "pgm"):
        shown = values[:, :, :3] if kind == "ppm" else values[:, :, 0]
        (at / f"deep.{kind}").write_bytes(
            (b"P6" if kind == "ppm" else b"P5") + b" 5 4 4095\n" + shown.astype(">u2").tobytes()
        )
    elif kind == "tiff":
        tiff16(at / "deep.tif", values[:, :, :3])
        assert Image.open(at / "deep.tif").mode == "RGB"  # the mode in which it would be read
    else:
        Image.new("F" if kind == "float" else "I", (5, 4)).save(at / "deep.tif")
    assert tells(refusal(source), "1 error", "8 bits", "cat/deep")


@pytest.mark.parametrize("ending", ["tif", "gif", "png", "webp"])
def test_images_of_several_pages_or_frames_are_rejected(ending: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "pictures", 4, 5, 3)
    more = [Image.fromarray(pixels(4, 5, 3)) for _ in range(2)]
    Image.fromarray(pixels(4, 5, 3)).save(source / "cat" / f"many.{ending}", save_all=True, append_images=more)
    assert tells(refusal(source), "1 error", "pages or frames", f"cat/many.{ending}: 3")


def test_the_preview_in_a_phones_photo_is_ignored_with_a_note(tmp_path: Path) -> None:
    source = folder(tmp_path / "pictures", 8, 8, 3)
    more = [Image.fromarray(pixels(8, 8, 3))]
    Image.fromarray(pixels(8, 8, 3)).save(source / "cat" / "a.jpg", format="MPO", save_all=True, append_images=more)
    done, x = packed(source)
    assert len(x) == 17
    assert tells(done.notes[0], "1 image", "further images")


def test_a_first_grey_image_does_not_make_the_others_grey(tmp_path: Path) -> None:
    source = folder(tmp_path / "pictures", 4, 5, 3)
    grey, colour = pixels(4, 5), np.asarray(Image.open(source / "dog" / "3.png"))
    Image.fromarray(grey).save(source / "cat" / "0.png")
    done, x = packed(source)
    assert holds(x, colour.transpose(2, 0, 1))
    assert holds(x, np.stack([grey] * 3))
    assert done.notes == ("1 image converted from L to RGB",)


def test_all_grey_images_stay_grey(tmp_path: Path) -> None:
    source = folder(tmp_path / "pictures", 4, 5)
    Image.new("LA", (5, 4), (7, 255)).save(source / "cat" / "opaque.png")
    Image.new("1", (5, 4), 1).save(source / "cat" / "bits.png")
    done, x = packed(source)
    assert done.card.spec.input_shape == (1, 4, 5)
    assert holds(x, np.full((1, 4, 5), 7, np.uint8))
    assert holds(x, np.full((1, 4, 5), 255, np.uint8))
    assert sorted(done.notes) == ["1 image converted from 1 to L", "1 image converted from LA to L"]


@pytest.mark.parametrize("mode", ["RGBA", "P", "LA"])
def test_transparency_is_dropped_with_a_note(mode: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "pictures", 4, 5, 3)
    image = Image.new("RGBA", (5, 4), (9, 9, 9, 255))
    image.putpixel((1, 2), (9, 9, 9, 0))
    image.convert(mode).save(source / "cat" / "hole.png")
    done, _ = packed(source)
    assert any(tells(note, "1 image", "transparent") for note in done.notes)
    assert any(tells(note, "1 image", "to RGB") for note in done.notes)


def test_cmyk_is_converted_with_a_note(tmp_path: Path) -> None:
    source = folder(tmp_path / "pictures", 8, 8, 3)
    Image.new("CMYK", (8, 8), (255, 0, 0, 0)).save(source / "cat" / "inks.tif")
    done, x = packed(source)
    assert holds(x, np.stack([np.full((8, 8), value, np.uint8) for value in (0, 255, 255)]))
    assert any(tells(note, "1 image", "CMYK") for note in done.notes)


# --- hostile files ----------------------------------------------------------------------------------------------------


def test_a_file_that_would_start_a_program_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder(tmp_path / "pictures", 4, 5)
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "gs"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (source / "cat" / "eps.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 4\n%%EndComments\nshowpage\n%%EOF\n"
    )
    assert tells(refusal(source), "1 error", "damaged image", "eps.png")
    assert not (tmp_path / "ran").exists()


def test_an_image_with_huge_dimensions_is_rejected_before_decoding(tmp_path: Path) -> None:
    source = folder(tmp_path / "pictures", 4, 5)
    for name, side in (("large", 10_000), ("huge", 60_000)):
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        part = b"IHDR" + header
        (source / "cat" / f"{name}.png").write_bytes(
            b"\x89PNG\r\n\x1a\n"
            + struct.pack(">I", 13)
            + part
            + struct.pack(">I", zlib.crc32(part))
            + bytes(4)
            + b"IDAT"
        )
    assert tells(refusal(source), "2 errors", "pixels", "huge.png", "large.png")


@pytest.mark.parametrize("ending", ["png", "jpg", "tif", "gif", "webp", "bmp", "ppm", "tga"])
def test_damaged_images_are_named_for_any_decoder_error(ending: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "pictures", 4, 5, 3)
    path = source / "cat" / f"a.{ending}"
    Image.fromarray(pixels(4, 5, 3)).save(path)
    whole = path.read_bytes()
    for i in range(60):
        broken = bytearray(whole[: RNG.integers(len(whole) // 2, len(whole) + 1)])
        for at in RNG.integers(0, len(broken), 4):
            broken[at] = RNG.integers(256)
        (source / "cat" / f"{i}-broken.{ending}").write_bytes(broken)
    (source / "cat" / "one.png").write_bytes(b"no image")
    assert tells(refusal(source), "damaged image")  # and no other exception


# --- notes ------------------------------------------------------------------------------------------------------------


def test_notes_of_a_folder_are_shown_by_every_command_that_partitions(tmp_path: Path) -> None:
    source = folder(tmp_path / "pictures", 6, 6, 3, each=20)
    Image.fromarray(pixels(6, 6)).save(source / "cat" / "0.png")
    data = {
        "dataset": "folder",
        "root": str(tmp_path / "data"),
        "source": {"path": str(source)},
        "partition": {"scheme": "iid", "clients": 3},
    }
    (tmp_path / "e.yaml").write_text(json.dumps({**TASK, "data": data}))
    for command in (["partition", "e.yaml"], ["run", "e.yaml", "--out", "run"]):  # read, and then cached
        done = run([sys.executable, "-m", "fedloom", *command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("1 image converted from L to RGB") == 1
        assert tells(done.stderr, "WARNING", source)
    assert json.loads((tmp_path / "run" / "partition.json").read_text())["spec"]["inputs"][""]["shape"] == [3, 6, 6]


def test_notes_reach_python_callers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = folder(tmp_path / "pictures", 6, 6, 3, each=20)
    Image.fromarray(pixels(6, 6)).save(source / "cat" / "0.png")
    data = {"dataset": "folder", "root": str(tmp_path / "data"), "source": {"path": str(source)}}
    with caplog.at_level(logging.WARNING, "fedloom.data"):
        of(TASK, data={**data, "partition": {"scheme": "iid", "clients": 3}})
    reported = [record.getMessage() for record in caplog.records if record.name == "fedloom.data"]
    assert len(reported) == 1
    assert tells(reported[0], source, "1 image converted from L to RGB")


@pytest.mark.slow
def test_notes_are_repeated_for_each_use_in_one_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = folder(tmp_path / "pictures", 6, 6, 3, each=20)
    Image.fromarray(pixels(6, 6)).save(source / "cat" / "0.png")
    data = {
        "dataset": "folder",
        "root": str(tmp_path / "data"),
        "source": {"path": str(source)},
        "partition": {"scheme": "iid", "clients": 3},
    }
    uses: list[Callable[[], object]] = [
        lambda: fedloom.run(TASK, data=data, out=tmp_path / "a", progress=False),
        lambda: fedloom.run(TASK, data=data, out=tmp_path / "b", progress=False),
        fedloom.Federated(data).open,
        fedloom.Federated(data).open,
    ]
    for use in uses:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fedloom.data"):
            use()
        reported = [record.getMessage() for record in caplog.records if record.name == "fedloom.data"]
        assert sum(tells(line, source, "1 image converted from L to RGB") for line in reported) == 1


# --- folders of splits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("train", "test"), ("Train", "TEST", "Val")])
def test_split_folders_are_not_classes(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        folder(tmp_path / "pictures" / name, 6, 6, 3, each=30)
    manifest = opened(tmp_path / "pictures", tmp_path).manifest
    assert manifest.spec.class_names == ("cat", "dog")
    assert 50 <= sum(entry.test for entry in manifest.clients) <= 60  # of 60; a fifth of all would be fewer


def test_training_examples_without_a_test_split_are_rejected(tmp_path: Path) -> None:
    for name in ("train", "val"):
        folder(tmp_path / "pictures" / name, 6, 6, 3, each=10)
    with pytest.raises(DataError) as error:
        opened(tmp_path / "pictures", tmp_path)
    assert tells(str(error.value), "40 examples", "testing")


def test_split_folders_beside_other_folders_are_rejected(tmp_path: Path) -> None:
    for name in ("train", "test", "more"):
        folder(tmp_path / "pictures" / name, 6, 6, 3, each=10)
    with pytest.raises(DataError) as error:
        opened(tmp_path / "pictures", tmp_path)
    assert tells(str(error.value), "test, train", "more")


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    folder(tmp_path / "pictures", 6, 6, 3, classes=("bus", "train"), each=30)
    assert opened(tmp_path / "pictures", tmp_path).manifest.spec.class_names == ("bus", "train")


def test_an_image_beside_split_folders_is_rejected(tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        folder(tmp_path / "pictures" / name, 6, 6, 3, each=10)
    Image.fromarray(pixels(6, 6, 3)).save(tmp_path / "pictures" / "stray.png")
    with pytest.raises(DataError) as error:
        pack(tmp_path / "pictures", tmp_path / "out", PackSettings(id="a", request=Request(labelled=False)))
    assert tells(str(error.value), "folders of splits, in 1 place: stray.png")
