// What metal-cpp uses of Mach: names of types.
#pragma once

using kern_return_t = int;
using task_id_token_t = unsigned int;
