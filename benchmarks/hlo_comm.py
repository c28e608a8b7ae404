"""Communication of a compiled XLA program, read from its optimised HLO text
(`benchmarks.hlo.traffic`).

python -m benchmarks.hlo_comm program.hlo.txt 128
"""

import argparse
from pathlib import Path

from benchmarks.hlo.traffic import bytes_by_kind, collectives


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("hlo", type=Path, help="text of an optimised HLO module")
    parser.add_argument("num_devices", type=int)
    parser.add_argument(
        "--top", type=int, default=12, help="list this many of the largest collectives (default 12)"
    )
    args = parser.parse_args()
    found = collectives(args.hlo.read_text(encoding="utf-8"), args.num_devices)
    for kind, size in bytes_by_kind(found).items():
        print(f"{kind:20s} {size / 2**20:12.2f} MiB per device")
    print(f"{'total':20s} {sum(c.bytes_per_device for c in found) / 2**20:12.2f} MiB per device")
    for c in sorted(found, key=lambda c: -c.bytes_per_device)[: args.top]:
        print(
            f"{c.bytes_per_device / 2**20:10.2f} MiB  {c.kind} n={c.group_size} x{c.executions} "
            f" {c.shape[:60]}  {c.op_name[-90:]}"
        )


if __name__ == "__main__":
    main()
