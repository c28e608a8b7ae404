"""GShard's table 4 from plans: how communication and computation of partitioned operators grow with
the devices (`benchmarks.gshard.operators`).

    python -m benchmarks.gshard_table4
"""

from benchmarks.gshard.operators import DEVICES, TABLE4, exponent, planned


def main() -> None:
    sizes = f"{'MiB at 2048':>12} {'asked':>8}"
    print(
        f"{'operator and dims that grow':34} {'collective':>14} {sizes} {'sending':>8} {'asked':>6}"
        f" {'compute':>8}  asked"
    )
    for row in TABLE4:
        found = [planned(row, d) for d in DEVICES]
        last, kind = found[-1], ",".join(sorted(found[-1].kinds)) or "none"
        sends = f"{exponent(DEVICES, [p.communication for p in found]):.2f}" if last.sent else "-"
        asked = "-" if row.communication is None else f"{row.communication:g}"
        compute = exponent(DEVICES, [p.compute for p in found])
        sizes = f"{last.sent / 2**20:12.1f} {row.sent(DEVICES[-1]) / 2**20:8.1f}"
        print(
            f"{row.title:34} {kind:>14} {sizes} {sends:>8} {asked:>6} {compute:8.2f} "
            f" {row.compute:g}"
        )


if __name__ == "__main__":
    main()
