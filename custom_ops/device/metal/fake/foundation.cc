#include "device/metal/fake/foundation.h"

#include <objc/runtime.h>

namespace kvfuse::fake_metal {

void AddFoundation() {
  Add(
      "+NSString", "stringWithCString:encoding:", +[](Object*, SEL, const char* text, uintptr_t encoding) {
        constexpr uintptr_t kUtf8 = 4;
        if (encoding != kUtf8) AbortWith("expected UTF-8 strings; found encoding " + std::to_string(encoding));
        return Autorelease(new String(text));
      });
  Add("NSString", "UTF8String", +[](String* self, SEL) { return self->text.c_str(); });

  Add("NSError", "localizedDescription", +[](ErrorObject* self, SEL) { return Autorelease(new String(self->words)); });
  Add("NSError", "code", +[](ErrorObject* self, SEL) { return self->code; });
}

}  // namespace kvfuse::fake_metal
