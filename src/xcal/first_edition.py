"""What keys were called, and what was meant before they were there: older files stay readable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys of the first edition that have another name today; files with the old ones are still read.
RENAMED: Mapping[str, str] = {
    "homes": "sites",
    "batch": "expected_batch_size",
    "clip": "max_grad_norm",
    "keep_mb": "feature_cache_mb",
}
# The keys of the first edition in their order, each with its name of today: digests of runs that
# were begun then are made of them.
FIRST_EDITION: Mapping[str, str] = {
    name: RENAMED.get(name, name)
    for name in (
        "preset method data pixels train_images network norm output_stride head_reads train "
        "train_norm weights clients participants rounds local_epochs quorum round_timeout average "
        "aggregation trim partition concentration units_per_client keep_groups homes epsilon delta "
        "accountant unit images_per_unit group_cap noise paired public_validation "
        "public_validation_by batch lr clip optimizer momentum views augment average_steps q alpha "
        "beta gamma fill tau rho band w kappa slow_tau reference contrast signal_every "
        "signal_fraction signal_source protected protection geometry clipping level quantile "
        "clip_rate kappa_b count_noise clip_factor sigma_decay validation_images road_images "
        "road_every road_test_images seed threads chunk pass_rows keep_mb device"
    ).split()
}
# What a run, a request or a study's cell meant that was written down before the key was there.
BEFORE_THE_KEY: Mapping[str, Any] = {
    "accountant": "renyi",
    "loss": None,
    "pool_views": "none",
    "whiten": 0.0,
    "maps": "gradcam",
    "shares": "left",
    "cover": "pixels",
    "steering": "signal",  # `xcal` was then what is now `xcal-steered`
}


def names_of_today(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values under the names that keys have today; of two names of one key the later counts."""
    return {RENAMED.get(key, key): value for key, value in values.items()}
