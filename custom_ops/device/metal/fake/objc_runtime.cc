#include "device/metal/fake/objc_runtime.h"

#include <objc/message.h>
#include <objc/runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

namespace kvfuse::fake_metal {
namespace {

struct MethodEntry {
  void (*function)() = nullptr;
  std::atomic<bool> called{false};
};

struct Runtime {
  std::mutex mutex;
  std::map<std::string, std::map<std::string, MethodEntry>> methods;  // by class, by selector
  std::map<std::string, std::unique_ptr<Object>> classes;
  std::map<const void*, const char*> live;  // address to class; classes are not in here
  std::set<const void*> class_addresses;
};

// metal-cpp looks classes and selectors up while static objects are made, so this may be no static object itself; and
// it must outlive all of them.
Runtime& TheRuntime() {
  static Runtime* runtime = new Runtime;
  return *runtime;
}

void AddClasses() {
  static const bool added = [] {
    AddObjectMethods();
    AddFoundation();
    AddMetal();
    return true;
  }();
  (void)added;
}

using Pool = std::vector<Object*>;
struct PoolStack {
  std::vector<std::pair<Object*, Pool>> pools;  // innermost last
  ~PoolStack() {
    if (!pools.empty()) AbortWith("expected the thread's autorelease pools to be released; found one left");
  }
};
PoolStack& Pools() {
  thread_local PoolStack stack;
  return stack;
}

class PoolObject : public Object {
 public:
  PoolObject() : Object("NSAutoreleasePool") { Pools().pools.emplace_back(this, Pool()); }
  ~PoolObject() override {
    auto& pools = Pools().pools;
    if (pools.empty() || pools.back().first != this) {
      AbortWith("expected the innermost autorelease pool of this thread to end first; found another one ending");
    }
    Pool content = std::move(pools.back().second);
    pools.pop_back();
    for (Object* object : content) Release(object);
  }
};

}  // namespace

void AbortWith(const std::string& sentence) {
  std::fprintf(stderr, "[fake metal] %s\n", sentence.c_str());
  std::abort();
}

Object::Object(const char* class_name) : class_name(class_name) {
  if (class_name[0] == '+') return;
  Runtime& runtime = TheRuntime();
  std::lock_guard<std::mutex> lock(runtime.mutex);
  runtime.live[this] = class_name;
}

Object::~Object() {
  Runtime& runtime = TheRuntime();
  std::lock_guard<std::mutex> lock(runtime.mutex);
  runtime.live.erase(this);
}

void Release(Object* object) {
  if (--object->retain_count == 0) delete object;
}

void AutoreleaseObject(Object* object) {
  auto& pools = Pools().pools;
  if (pools.empty()) {
    AbortWith(std::string("expected an autorelease pool around the call; found none, so a ") + object->class_name +
              " leaks");
  }
  pools.back().second.push_back(object);
}

void AddMethod(const char* class_name, const char* selector, void (*function)()) {
  TheRuntime().methods[class_name][selector].function = function;
}

void RemoveMethod(const char* class_name, const char* selector) {
  Runtime& runtime = TheRuntime();
  AddClasses();
  std::lock_guard<std::mutex> lock(runtime.mutex);
  runtime.methods[class_name].erase(selector);
}

std::map<std::string, int> LiveObjects() {
  Runtime& runtime = TheRuntime();
  std::lock_guard<std::mutex> lock(runtime.mutex);
  std::map<std::string, int> counts;
  for (const auto& [address, class_name] : runtime.live) ++counts[class_name];
  return counts;
}

namespace {

std::string Spelled(const std::string& class_name, const std::string& selector) {
  const bool of_class = class_name[0] == '+';
  return (of_class ? "+[" + class_name.substr(1) : "-[" + class_name) + " " + selector + "]";
}

std::set<std::string> Methods(bool only_called) {
  Runtime& runtime = TheRuntime();
  AddClasses();
  std::lock_guard<std::mutex> lock(runtime.mutex);
  std::set<std::string> names;
  for (const auto& [class_name, methods] : runtime.methods) {
    for (const auto& [selector, method] : methods) {
      if (!only_called || method.called) names.insert(Spelled(class_name, selector));
    }
  }
  return names;
}

MethodEntry* Find(Runtime& runtime, const std::string& class_name, const std::string& selector) {
  for (const std::string& holder : {class_name, std::string("NSObject")}) {
    const auto methods = runtime.methods.find(holder);
    if (methods == runtime.methods.end()) continue;
    const auto method = methods->second.find(selector);
    if (method != methods->second.end()) return &method->second;
  }
  return nullptr;
}

}  // namespace

std::set<std::string> KnownMethods() { return Methods(false); }
std::set<std::string> CalledMethods() { return Methods(true); }

void AddObjectMethods() {
  Add("NSObject", "retain", +[](Object* self, SEL) { return Retain(self); });
  Add("NSObject", "release", +[](Object* self, SEL) { Release(self); });
  Add(
      "NSObject", "respondsToSelector:", +[](Object* self, SEL, SEL selector) {
        Runtime& runtime = TheRuntime();
        std::lock_guard<std::mutex> lock(runtime.mutex);
        return Find(runtime, self->class_name, reinterpret_cast<const char*>(selector)) != nullptr;
      });
  Add("+NSAutoreleasePool", "alloc", +[](Object*, SEL) -> Object* { return new PoolObject; });
  Add("NSAutoreleasePool", "init", +[](Object* self, SEL) { return self; });
}

}  // namespace kvfuse::fake_metal

using namespace kvfuse::fake_metal;

extern "C" {

// A selector is its own unique name.
SEL sel_registerName(const char* name) {
  static std::set<std::string>* names = new std::set<std::string>;
  static std::mutex* mutex = new std::mutex;
  std::lock_guard<std::mutex> lock(*mutex);
  return reinterpret_cast<SEL>(const_cast<char*>(names->insert(name).first->c_str()));
}

// Null for classes that the fake has not: a message to null does nothing, as on a system without the class.
void* objc_lookUpClass(const char* name) {
  Runtime& runtime = TheRuntime();
  AddClasses();
  std::lock_guard<std::mutex> lock(runtime.mutex);
  const auto methods = runtime.methods.find(std::string("+") + name);
  if (methods == runtime.methods.end()) return nullptr;
  auto& object = runtime.classes[methods->first];
  if (!object) {
    object = std::make_unique<Object>(methods->first.c_str());
    runtime.class_addresses.insert(object.get());
  }
  return object.get();
}

void* objc_getProtocol(const char*) { return nullptr; }

// The method that `receiver` runs for `selector`; objc_msgSend jumps to it with the registers as they were.
__attribute__((used, visibility("hidden"))) void* kvfuse_fake_metal_method(const void* receiver, SEL selector) {
  Runtime& runtime = TheRuntime();
  const auto* name = reinterpret_cast<const char*>(selector);
  std::lock_guard<std::mutex> lock(runtime.mutex);
  if (runtime.live.count(receiver) == 0 && runtime.class_addresses.count(receiver) == 0) {
    AbortWith(std::string("expected a live object for the message ") + name + "; found a released one");
  }
  const std::string class_name = static_cast<const Object*>(receiver)->class_name;
  MethodEntry* method = Find(runtime, class_name, name);
  if (method == nullptr) {
    AbortWith("expected a method that the fake has; found " + Spelled(class_name, name) +
              ", which kvfuse did not use when the fake was written");
  }
  method->called = true;
  return reinterpret_cast<void*>(method->function);
}

}  // extern "C"

// Saves every register that can carry an argument, asks for the method, and jumps to it; arguments on the stack stay
// where they are. A null receiver answers 0.
#if defined(__x86_64__)
asm(R"(
.text
.globl objc_msgSend
.hidden objc_msgSend
.type objc_msgSend, @function
objc_msgSend:
  .cfi_startproc
  testq %rdi, %rdi
  je 1f
  pushq %rbp
  .cfi_def_cfa_offset 16
  .cfi_offset %rbp, -16
  movq %rsp, %rbp
  .cfi_def_cfa_register %rbp
  subq $192, %rsp
  movq %rdi, (%rsp)
  movq %rsi, 8(%rsp)
  movq %rdx, 16(%rsp)
  movq %rcx, 24(%rsp)
  movq %r8, 32(%rsp)
  movq %r9, 40(%rsp)
  movq %rax, 48(%rsp)
  movups %xmm0, 64(%rsp)
  movups %xmm1, 80(%rsp)
  movups %xmm2, 96(%rsp)
  movups %xmm3, 112(%rsp)
  movups %xmm4, 128(%rsp)
  movups %xmm5, 144(%rsp)
  movups %xmm6, 160(%rsp)
  movups %xmm7, 176(%rsp)
  call kvfuse_fake_metal_method
  movq %rax, %r11
  movq (%rsp), %rdi
  movq 8(%rsp), %rsi
  movq 16(%rsp), %rdx
  movq 24(%rsp), %rcx
  movq 32(%rsp), %r8
  movq 40(%rsp), %r9
  movq 48(%rsp), %rax
  movups 64(%rsp), %xmm0
  movups 80(%rsp), %xmm1
  movups 96(%rsp), %xmm2
  movups 112(%rsp), %xmm3
  movups 128(%rsp), %xmm4
  movups 144(%rsp), %xmm5
  movups 160(%rsp), %xmm6
  movups 176(%rsp), %xmm7
  leave
  .cfi_def_cfa %rsp, 8
  jmp *%r11
1:
  xorl %eax, %eax
  xorps %xmm0, %xmm0
  ret
  .cfi_endproc
.size objc_msgSend, .-objc_msgSend
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl objc_msgSend
.hidden objc_msgSend
.type objc_msgSend, %function
objc_msgSend:
  cbz x0, 1f
  stp x29, x30, [sp, #-224]!
  mov x29, sp
  stp x0, x1, [sp, #16]
  stp x2, x3, [sp, #32]
  stp x4, x5, [sp, #48]
  stp x6, x7, [sp, #64]
  str x8, [sp, #80]
  stp q0, q1, [sp, #96]
  stp q2, q3, [sp, #128]
  stp q4, q5, [sp, #160]
  stp q6, q7, [sp, #192]
  bl kvfuse_fake_metal_method
  mov x16, x0
  ldp x0, x1, [sp, #16]
  ldp x2, x3, [sp, #32]
  ldp x4, x5, [sp, #48]
  ldp x6, x7, [sp, #64]
  ldr x8, [sp, #80]
  ldp q0, q1, [sp, #96]
  ldp q2, q3, [sp, #128]
  ldp q4, q5, [sp, #160]
  ldp q6, q7, [sp, #192]
  ldp x29, x30, [sp], #224
  br x16
1:
  movi d0, #0
  ret
.size objc_msgSend, .-objc_msgSend
)");
#else
#error "The fake Objective-C runtime expects x86-64 or aarch64."
#endif
