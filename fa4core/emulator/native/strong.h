// Ordering through memory: what a strong (relaxed, acquire, release, volatile, atomic) access on an
// address tells others. PTX ISA: "Release and Acquire Patterns", "Observation order".
//
// A releasing write leaves its warp's clock at the address; a relaxed one leaves the clock of the warp's
// last fence. An acquiring read takes what lies there; a relaxed one keeps it until the next fence.
#pragma once
#include "machine.h"

namespace emu {

void observe(Warp& w, u64 address, bool acquire);   // after the read
void publish(Warp& w, u64 address, bool release);   // before the write
void released(Warp& w);                             // after releasing writes: start a new epoch
void fence(Warp& w);                                // fence.acq_rel/sc, membar

// Used by several opcode families.
void track(Warp& w, const u64* addresses, u32 bytes, Mask m, bool write, bool atomic, bool silent = false);
void lane_addresses(Warp& w, const Ins& i, u32 plane, int space, Mask m, u64* a);
void decode_cp_async(Decoder& d);
void decode_st_async(Decoder& d);

}  // namespace emu
