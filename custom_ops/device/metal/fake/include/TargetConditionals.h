// No Apple system: metal-cpp then leaves out what only macOS or only iOS has.
#pragma once

#define TARGET_OS_OSX 0
#define TARGET_OS_IPHONE 0
