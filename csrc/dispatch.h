// The handle by which C++ calls one of our own ops through the dispatcher, so that autograd, Meta,
// autocast and profilers see the call.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

namespace parallel_ext {

template <typename Signature>
c10::TypedOperatorHandle<Signature> op_handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace parallel_ext
