/* A wall clock that a test sets: preloaded before libc, it bends CLOCK_REALTIME and leaves the monotonic clock alone.
 *
 * CLOCK_FILE names a file of three doubles {offset, rate, origin}, mapped once; children share it:
 *     time = origin + (real - origin) * rate + offset
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile double *bend;

static double bent(double real) {
    if (bend == NULL) {
        int file = open(getenv("CLOCK_FILE"), O_RDONLY | O_CLOEXEC);
        bend = mmap(NULL, 3 * sizeof(double), PROT_READ, MAP_SHARED, file, 0);
        close(file);
    }
    return bend[2] + (real - bend[2]) * bend[1] + bend[0];
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    long failed = syscall(SYS_clock_gettime, clock, now);
    if (failed == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        double seconds = bent(now->tv_sec + now->tv_nsec * 1e-9);
        now->tv_sec = (time_t)seconds;
        now->tv_nsec = (long)((seconds - (double)now->tv_sec) * 1e9);
    }
    return (int)failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    (void)zone;
    int failed = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *out) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (out != NULL) *out = precise.tv_sec;
    return precise.tv_sec;
}
