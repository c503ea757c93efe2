/* bcryptprimitives.dll for Wine before 8.4, which has none. Rust's standard library takes its random seeds from it. */
#include <windows.h>

BOOLEAN NTAPI SystemFunction036(PVOID data, ULONG size); /* RtlGenRandom of advapi32.dll */

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE data, SIZE_T size) {
    for (SIZE_T done = 0; done < size;) {
        ULONG part = size - done < 1 << 20 ? (ULONG)(size - done) : 1 << 20;
        if (!SystemFunction036(data + done, part)) return FALSE;
        done += part;
    }
    return TRUE;
}
