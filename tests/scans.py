"""DICOM files, made on the spot."""

from __future__ import annotations

import io

import numpy as np
import pytest

RAMP = np.tile(np.linspace(0, 4000, 16).astype(np.uint16), (16, 1))


def dicom(pixels: np.ndarray, patient: str = "p", **tags: object) -> bytes:
    """An uncompressed DICOM file of these values."""
    pydicom = pytest.importorskip("pydicom", reason="the extra 'dicom' is not installed")
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    dataset = Dataset()
    dataset.file_meta = meta
    dataset.SOPClassUID = meta.MediaStorageSOPClassUID
    dataset.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    dataset.PatientID = patient
    dataset.Rows, dataset.Columns = pixels.shape[:2]
    dataset.SamplesPerPixel = 1 if pixels.ndim == 2 else 3
    dataset.PhotometricInterpretation = "MONOCHROME2" if pixels.ndim == 2 else "RGB"
    if pixels.ndim == 3:
        dataset.PlanarConfiguration = 0
    bits = 8 * pixels.dtype.itemsize
    dataset.BitsAllocated = dataset.BitsStored = bits
    dataset.HighBit = bits - 1
    dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
    dataset.PixelData = pixels.tobytes()
    for tag, value in tags.items():
        setattr(dataset, tag, value)
    out = io.BytesIO()
    pydicom.dcmwrite(out, dataset, enforce_file_format=True)
    return out.getvalue()
