"""DICOM and NIfTI files, which are not read: other packages turn them into arrays."""

from __future__ import annotations

from pathlib import Path

from fedloom.data.listing import files_below
from fedloom.errors import DataError

ENDINGS = (".dcm", ".dicom", ".nii", ".nii.gz")

HOW_TO_READ = (
    "read them with pydicom (dcmread(file).pixel_array) or nibabel (load(file).get_fdata()), and give the arrays: x "
    "and y of an .npz file, or Federated.from_arrays; or save slices of 8 bits as PNG; or register a data set that "
    "reads them (docs/extending.md#a-data-set)"
)
"""Hint for DICOM and NIfTI files."""


def is_medical(path: Path) -> bool:
    """Return True for a DICOM or NIfTI file; DICOM files without an extension have a mark at byte 128."""
    if path.name.lower().endswith(ENDINGS):
        return True
    if path.suffix or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def refuse_medical(folder: Path) -> None:
    """Raise DataError if a folder holds DICOM or NIfTI files."""
    if found := [path for path in files_below(folder) if is_medical(path)]:
        raise DataError(
            f"{folder}: DICOM and NIfTI files are not read, and it has {len(found):,} (first: "
            f"{found[0].relative_to(folder)}).",
            hint=HOW_TO_READ,
        )
