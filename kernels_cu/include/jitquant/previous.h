// What the next launch follows, which bindings tell launch().
#pragma once

namespace jitquant {

// Whether the next launch of this thread is captured into a CUDA graph behind something else than a
// kernel of this project. Such a kernel seldom lets the next one begin before its own end, and a
// programmatic launch behind it takes 0.3 to 0.5 us longer than a plain one. Of several launches of
// a call the others follow the first.
inline thread_local bool follows_other_kernel = false;

}  // namespace jitquant
