"""The benchmark: step-time ratios from interleaved repetitions, memory from separate processes."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from peers.memory import memory_growth
from peers.variants import FOREIGN, NETWORKS, SECURE_INLINE, VARIANTS, Setting, Step, make_step
from xcal.errors import UserError

ROUNDS = 15
_SLOW = 5.0  # variants this many times slower than SGD …
_SLOW_ROUNDS = 3  # … are repeated this often

Row = dict[str, Any]


def run_bench(
    *,
    networks: Sequence[str] = NETWORKS,
    pixels: Sequence[int] = (64, 128),
    variants: Sequence[str] = VARIANTS,
    rounds: int = ROUNDS,
    threads: Sequence[int] = (1, 2),
    memory: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """One row per network, size, number of threads and variant.

    A row holds network, pixels, threads, variant, ratio_to_sgd with its quartiles q25 and q75,
    memory_mb, and step_ms, the median time of a step. Ratios are paired: each repetition is
    divided by the plain step of the same round. A variant that cannot run has nulls and a reason.
    The row of `ours-secure-noise` has also `ratio_without_ahead`, with noise drawn in the step.
    """
    _check("network", networks, (*NETWORKS, *FOREIGN))
    _check("variant", variants, VARIANTS)
    if rounds < 1 or any(count < 1 for count in threads) or any(size < 32 for size in pixels):
        raise UserError("the benchmark needs at least 1 round, 1 thread and 32 pixels")
    rows: list[Row] = []
    for count in threads:
        for size in pixels:
            for network in networks:
                setting = Setting(network, size)
                with _threads(count):
                    timed = _time_all(setting, variants, rounds, progress)
                for variant in variants:
                    growth, why = None, None
                    if memory and timed[variant]["reason"] is None:
                        progress(f"{network} {size} px, {count} thread(s): memory of {variant}")
                        growth, why = memory_growth(variant, setting, count)
                    row = {"network": network, "pixels": size, "threads": count} | timed[variant]
                    row["memory_mb"] = growth
                    row["reason"] = row["reason"] or why
                    if row["reason"] is None:
                        del row["reason"]
                    rows.append(row)
    return rows


def _check(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise UserError(f"there is no {what} {name!r}: choose from {', '.join(known)}")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _time_all(
    setting: Setting, variants: Sequence[str], rounds: int, progress: Callable[[str], None]
) -> dict[str, Row]:
    wanted = ["sgd", *(v for v in variants if v != "sgd")]
    if "ours-secure-noise" in wanted:
        wanted.append(SECURE_INLINE)
    steps: dict[str, Step] = {}
    reasons: dict[str, str] = {}
    times: dict[str, list[tuple[int, float]]] = {name: [] for name in wanted}
    counts = dict.fromkeys(wanted, 0)
    where = f"{setting.network} {setting.pixels} px, {torch.get_num_threads()} thread(s)"

    def timed(name: str) -> float:
        step = steps[name]
        start = time.perf_counter()
        for _ in range(step.cycle):
            step.run(counts[name])
            counts[name] += 1
        return (time.perf_counter() - start) / step.cycle

    try:
        for name in wanted:
            progress(f"{where}: first step of {name}")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    steps[name] = make_step(name, setting)
                    timed(name)
            except Exception as error:  # a peer may fail in any way; its row says how
                steps.pop(name, Step(lambda _: None)).close()
                first = (str(error).splitlines() or [""])[0]
                reasons[name] = f"{type(error).__name__}: {first}"
            gc.collect()
        for number in range(rounds):
            progress(f"{where}: round {number + 1} of {rounds}")
            for name in _turned(list(steps), number):
                if number >= _SLOW_ROUNDS and _is_slow(times, name):
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    times[name].append((number, timed(name)))
    finally:
        for step in steps.values():
            step.close()
    plain = dict(times["sgd"])
    rows = {name: _row(name, times[name], plain, reasons.get(name)) for name in wanted}
    ours = dict(times.get("ours", ()))
    for name in wanted:
        if ours and times[name]:
            # Paired with our step of the same round: what both met there cancels.
            pairs = [seconds / ours[number] for number, seconds in times[name] if number in ours]
            rows[name]["ratio_to_ours"] = round(statistics.median(pairs), 3)
    if SECURE_INLINE in rows:
        inline = rows[SECURE_INLINE]["ratio_to_sgd"]
        rows["ours-secure-noise"]["ratio_without_ahead"] = inline
    return rows


def _turned(names: list[str], number: int) -> list[str]:
    """Another variant goes first each round, so that none always follows the same neighbor."""
    start = number % len(names)
    return names[start:] + names[:start]


def _is_slow(times: dict[str, list[tuple[int, float]]], name: str) -> bool:
    plain = dict(times["sgd"])
    return statistics.median(t / plain[n] for n, t in times[name]) > _SLOW


def _row(
    variant: str, times: list[tuple[int, float]], plain: dict[int, float], reason: str | None
) -> Row:
    row: Row = {"variant": variant, "ratio_to_sgd": None, "q25": None, "q75": None}
    row |= {"memory_mb": None, "step_ms": None, "reason": reason}
    if times:
        ratios = [seconds / plain[number] for number, seconds in times]
        low, middle, high = _quartiles(ratios)
        row |= {"ratio_to_sgd": round(middle, 3), "q25": round(low, 3), "q75": round(high, 3)}
        row["step_ms"] = round(1e3 * statistics.median(seconds for _, seconds in times), 1)
    return row


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
