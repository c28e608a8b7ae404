"""Seconds of a step on the TPU compiler's own schedule, read from its optimised HLO text
(`benchmarks.hlo.schedule`).

    python -m benchmarks.hlo_time program.hlo.txt 16 --chip v5e
"""

import argparse
from pathlib import Path

from benchmarks.hlo.schedule import CHIPS, hottest, step_time


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("hlo", type=Path, help="text of an optimised HLO module for TPU")
    parser.add_argument("num_devices", type=int)
    parser.add_argument("--chip", choices=CHIPS, default="v5e")
    parser.add_argument(
        "--top", type=int, default=0, help="list this many of the hottest operations"
    )
    args = parser.parse_args()
    text = args.hlo.read_text(encoding="utf-8")
    found = step_time(text, args.num_devices, args.chip)
    print(
        f"{found.cycles / 1e6:.2f} Mcycles = {found.compute * 1e3:.3f} ms, exposed collectives"
        f" {found.exposed * 1e3:.3f} ms, step {found.seconds * 1e3:.3f} ms,"
        f" {found.bytes_per_device / 2**20:.1f} MiB sent per device;"
        f" not counted: {', '.join(found.unknown) or 'nothing'}"
    )
    for kind, seconds in sorted(found.exposed_by_kind.items()):
        print(f"{seconds * 1e3:10.3f} ms exposed  {kind}")
    for name, cycles in list(hottest(text).items())[: args.top]:
        print(f"{cycles / 1e6:10.2f} Mcycles a turn  {name[-100:]}")


if __name__ == "__main__":
    main()
