#include "lanes.h"
namespace emu { void register_mma(Table&) {} }
