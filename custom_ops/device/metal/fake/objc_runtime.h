// A small Objective-C runtime: objects with retain counts, autorelease pools, and methods found by selector. It is
// stricter than Apple's: what is only a leak or a crash there ends the process here with a sentence.
#pragma once

#include <atomic>
#include <map>
#include <set>
#include <string>
#include <utility>

namespace kvfuse::fake_metal {

// Every object and every class. The C++ pointer is what metal-cpp takes for the Objective-C one.
class Object {
 public:
  explicit Object(const char* class_name);
  virtual ~Object();
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  const char* const class_name;  // of a class itself: "+" and its name
  std::atomic<int> retain_count{1};
};

// Ends the process with `[fake metal] sentence`.
[[noreturn]] void AbortWith(const std::string& sentence);

template <typename T>
T* Retain(T* object) {
  if (object != nullptr) ++object->retain_count;
  return object;
}
void Release(Object* object);
// The object goes when the innermost pool of this thread ends.
void AutoreleaseObject(Object* object);
template <typename T>
T* Autorelease(T* object) {
  if (object != nullptr) AutoreleaseObject(object);
  return object;
}

// A counted reference that the fake's objects hold on each other.
template <typename T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(T* object) : object_(Retain(object)) {}
  Ref(const Ref& other) : object_(Retain(other.object_)) {}
  Ref& operator=(Ref other) {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    if (object_ != nullptr) Release(object_);
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  T* object_ = nullptr;
};

// Makes `function(self, selector, arguments...)` the method; class methods belong to "+" and the class's name.
void AddMethod(const char* class_name, const char* selector, void (*function)());
template <typename Result, typename... Arguments>
void Add(const char* class_name, const char* selector, Result (*function)(Arguments...)) {
  AddMethod(class_name, selector, reinterpret_cast<void (*)()>(function));
}
// No object of this class answers to the selector from now on, as on an older system.
void RemoveMethod(const char* class_name, const char* selector);

// Objects by class that somebody still holds; empty when every retain has met its release.
std::map<std::string, int> LiveObjects();
// "-[MTLBuffer contents]" or "+[NSString …]", of methods the fake has, and of those that were called.
std::set<std::string> KnownMethods();
std::set<std::string> CalledMethods();

// Register the classes; called once, before the first look-up.
void AddObjectMethods();
void AddFoundation();
void AddMetal();

}  // namespace kvfuse::fake_metal
