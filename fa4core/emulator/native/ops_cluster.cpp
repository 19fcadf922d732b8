// Cluster addresses (mapa, getctarank) and cluster launch control. PTX ISA: "mapa", "getctarank",
// "clusterlaunchcontrol.try_cancel", "clusterlaunchcontrol.query_cancel". The 16-byte response is
// opaque in PTX; here: word 0 is 1 if a cluster was cancelled, words 1 to 3 are its first CTA.
#include "lanes.h"
#include "strong.h"

namespace emu {
namespace {

void mapa(Warp& w, const Ins& i, Mask m) {  // n: generic (64-bit) addresses
  FOR_LANES (l, m) {
    // A rank beyond the cluster is no error until its address is used: lanes without a CTA do this.
    u32 rank = std::min(w.r(i.a[2])[l], 255u);
    u32 v = (w.r(i.a[1])[l] & OFFSET_MASK) | rank << RANK_SHIFT;
    w.w(i.a[0])[l] = v;
    if (i.bytes == 8) w.w(i.a[0] + 1)[l] = i.n ? (u32)(SHARED_WINDOW >> 32) : 0;
  }
}

void getctarank(Warp& w, const Ins& i, Mask m) {
  FOR_LANES (l, m) w.w(i.a[0])[l] = w.r(i.a[1])[l] >> RANK_SHIFT;
}

struct Cancel : Flight {
  Machine* k;
  u32 to, bar;
  bool multicast;
  u32 answer[4] = {};
  FlightShot shot;
  void land() override {
    if (!k->waiting_clusters.empty()) {
      u32 linear = k->waiting_clusters.front();
      k->waiting_clusters.pop_front();
      answer[0] = 1;
      for (u32 a = 0; a < 3; a++) {
        u32 n = k->info.grid[a] / k->info.cluster[a];
        answer[1 + a] = linear % n * k->info.cluster[a];
        linear /= n;
      }
    }
    each([&](Cta& t) {
      Mbarrier* b = k->barrier(warp, t, bar & OFFSET_MASK, pc);
      Who x = async_who(*warp, shot, b->comp, b->phase + 1);
      if (k->race) k->shared_race(t, true, to & OFFSET_MASK, 16, x, warp, pc);
      if (k->uninitialised) t.shared_shadow.mark(to & OFFSET_MASK, 16);
      std::memcpy(t.shared.data() + (to & OFFSET_MASK), answer, 16);
    });
  }
  void complete() override {
    each([&](Cta& t) {
      Mbarrier* b = k->barrier(warp, t, bar & OFFSET_MASK, pc);
      if (k->race) b->gathered[b->comp] = std::max(b->gathered[b->comp], b->phase + 1);
      k->complete_tx(*b, t, 16);
    });
  }
  template <class F>
  void each(F f) {
    if (multicast)
      for (auto& t : warp->cluster->ctas) f(*t);
    else f(k->cta_of(*warp, to));
  }
  std::string describe() const override { return "clusterlaunchcontrol.try_cancel"; }
};

void try_cancel(Warp& w, const Ins& i, Mask m) {
  Machine& k = *w.machine;
  FOR_LANES (l, m) {
    auto f = std::make_shared<Cancel>();
    f->k = &k, f->warp = &w, f->pc = (int)w.at;
    f->to = (u32)w.r(i.a[0])[l] + (u32)i.x->n[0], f->bar = (u32)w.r(i.a[1])[l] + (u32)i.x->n[1];
    f->multicast = i.n;
    f->shot = shoot(w);
    k.shared(w, f->to, 16, "clusterlaunchcontrol.try_cancel");
    if (k.trace) {
      u32 ranks = f->multicast ? (u32)w.cluster->ctas.size() : 1;
      for (u32 n = 0; n < ranks; n++) {
        u32 rank = f->multicast ? n : f->bar >> RANK_SHIFT;
        k.trace->event(w, Traced::WorkId, (i32)rank, (i32)(f->bar & OFFSET_MASK), 16, (i32)rank);
      }
    }
    k.add_flight(*w.cluster, f);
  }
}

void query(Warp& w, const Ins& i, Mask m) {  // n: 0 is_canceled, 1 all of the CTA id, 2.. one axis
  FOR_LANES (l, m) {
    if (i.n == 0) {
      Mask& p = w.preds[i.a[0]];
      p = (p & ~(1u << l)) | (w.r(i.a[1])[l] & 1) << l;
    } else if (i.n == 1) {
      for (u32 a = 0; a < 4; a++)
        if (i.x->regs[a] != NONE) w.w(i.x->regs[a])[l] = a < 3 ? w.r(i.a[1] + 1 + a)[l] : 0;
    } else w.w(i.a[0])[l] = w.r(i.a[1] + (u32)i.n - 1)[l];
  }
}

void decode_clc(Decoder& d) {
  auto& x = d.extra();
  if (d.has("try_cancel")) {
    d.ins.a[0] = d.address(0), x.n[0] = d.ins.offset;
    d.ins.a[1] = d.address(1), x.n[1] = d.ins.offset;
    d.ins.n = d.has("multicast::cluster::all");
    d.ins.fn = try_cancel;
    return;
  }
  d.ins.a[1] = d.src(1, B128);
  d.ins.fn = query;
  if (d.has("is_canceled")) d.ins.n = 0, d.ins.a[0] = d.pred(0);
  else if (d.has("get_first_ctaid")) d.ins.n = 1, x.regs = d.list(0, B32, true);
  else {
    d.ins.n = d.has("get_first_ctaid::x")   ? 2
              : d.has("get_first_ctaid::y") ? 3
              : d.has("get_first_ctaid::z") ? 4
                                            : 0;
    if (!d.ins.n) d.unknown();
    d.ins.a[0] = d.dst(0, B32);
  }
}

}  // namespace

void register_cluster(Table& t) {
  t["mapa"] = [](Decoder& d) {
    Type ty = d.type();
    bool generic = true;
    for (auto& s : d.st.mods) generic &= s.rfind("shared", 0) != 0;
    d.ins.a[0] = d.dst(0, ty), d.ins.a[1] = d.src(1, ty), d.ins.a[2] = d.src(2, U32);
    d.ins.bytes = (u8)(type_bits(ty) / 8);
    d.ins.n = generic;
    d.ins.fn = mapa;
  };
  t["getctarank"] = [](Decoder& d) {
    d.ins.a[0] = d.dst(0, U32), d.ins.a[1] = d.src(1, d.type());
    d.ins.fn = getctarank;
  };
  t["clusterlaunchcontrol"] = decode_clc;
}

}  // namespace emu
