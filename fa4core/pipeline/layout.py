"""Places the regions of a pipeline; refuses what does not fit.

Offsets are decided here and nowhere else. Plain Python; kernels, the checker and `show` use it.
"""

from __future__ import annotations

import attrs

from fa4core.pipeline.declare import DoesNotFit, Region


@attrs.frozen
class Placed:
    """A region at its place: stage `i` begins at `offset + i * stride`."""

    region: Region
    offset: int
    stride: int

    @property
    def end(self) -> int:
        return self.offset + self.stride * (self.region.stages - 1) + self.region.size

    def at(self, stage):
        """Where a stage begins; `stage` may be a device value."""
        return self.offset + stage * self.stride


def place(regions: tuple[Region, ...], limit: int, unit: str) -> dict[str, Placed]:
    """Offsets of all regions, in order of declaration, aliases inside their hosts.

    Raises:
        DoesNotFit: Saying what is asked for and what there is.
    """
    placed: dict[str, Placed] = {}
    top = 0
    for region in regions:
        if region.inside is None:
            stride = -(-region.size // region.align) * region.align
            offset = -(-top // region.align) * region.align
            placed[region.name] = Placed(region, offset, stride)
            top = offset + stride * region.stages
            continue
        host = placed[region.inside]
        stages, last = host.region.stages, region.offset
        if region.stride is not None:  # all stages lie in one of the host's
            last += region.stride * (region.stages - 1)
            stages *= region.stages
        if last + region.size > host.region.size or region.stages != stages:
            raise DoesNotFit(
                f"{region.name}: {region.stages} x {region.size} {unit} at {region.offset} inside "
                f"{region.inside}, which has {host.region.stages} x {host.region.size}"
            )
        stride = host.stride if region.stride is None else region.stride
        placed[region.name] = Placed(region, host.offset + region.offset, stride)
    if top > limit:
        listed = ", ".join(f"{r.name} {r.stages} x {r.size}" for r in regions if not r.inside)
        raise DoesNotFit(f"{top} {unit} for {listed}; {limit} exist")
    return placed
