// What the files of the tcgen05 family share.
#pragma once
#include "machine.h"

namespace emu {

void check_columns(Machine& k, Cta& t, u32 column, u32 columns, const char* what, Warp* w, int pc);
void tmem_mark(Cta& t, u32 lane, u32 lanes, u32 column, u32 columns);
void tmem_read_check(Machine& k, Cta& t, u32 lane, u32 lanes, u32 column, u32 columns, Warp* w, int pc);
void decode_tmem(Decoder& d);

}  // namespace emu
