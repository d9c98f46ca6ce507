"""NVIDIA FLARE as carrier: mutual TLS between hospitals, jobs that hold configuration only.

FLARE carries messages; what is trained, charged, refused, stored and resumed is decided by the
engine-free core. Only this folder imports FLARE, and only where it is needed: provisioning files
can be read and checked without it.
"""
