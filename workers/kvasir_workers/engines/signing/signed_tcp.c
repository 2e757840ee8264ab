/* Signs the TCP connections between the ranks of one engine, where its libraries cannot.
 *
 * Loaded with LD_PRELOAD into every process of an engine over several nodes. A socket on which torch (its store and
 * gloo) or ZeroMQ listens or connects gets the key in the variable KVASIR_ENGINE_KEY as its TCP signature (RFC 2385,
 * Linux's TCP_MD5SIG): the kernel then drops each segment without a valid signature, so that nobody without the key
 * gets a connection, or puts a byte into one. Sockets of other callers are left alone, and so is everything without
 * the variable.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <linux/tcp.h>

static const char *const TORCH = "libtorch_cpu.";
static const char *const ZMQ = "libzmq";
static const char *const VARIABLE = "KVASIR_ENGINE_KEY";

/* Shows that the library is loaded. */
__attribute__((visibility("default"))) const int kvasir_signs_sockets = 1;

static int signs_for(const void *caller) {
    Dl_info from;
    if (!dladdr(caller, &from) || from.dli_fname == NULL) return 0;
    const char *name = strrchr(from.dli_fname, '/');
    name = name == NULL ? from.dli_fname : name + 1;
    return strncmp(name, ZMQ, strlen(ZMQ)) == 0 || strncmp(name, TORCH, strlen(TORCH)) == 0;
}

static const char *engine_key(void) {
    const char *key = getenv(VARIABLE);
    return key != NULL && *key != '\0' ? key : NULL;
}

static int sign(int fd, const char *key, const void *peer, socklen_t size, int all_addresses) {
    struct tcp_md5sig signature;
    size_t length = strlen(key);
    memset(&signature, 0, sizeof signature);
    if (length > sizeof signature.tcpm_key || size > sizeof signature.tcpm_addr) {
        errno = EINVAL;
        return -1;
    }
    memcpy(&signature.tcpm_addr, peer, size);
    memcpy(signature.tcpm_key, key, length);
    signature.tcpm_keylen = (unsigned short)length;
    signature.tcpm_flags = all_addresses ? TCP_MD5SIG_FLAG_PREFIX : 0;
    return setsockopt(fd, IPPROTO_TCP, all_addresses ? TCP_MD5SIG_EXT : TCP_MD5SIG, &signature, sizeof signature);
}

/* Whoever connected before the key was there did so without one. */
static void turn_away(int fd) {
    int flags = fcntl(fd, F_GETFL);
    if (flags == -1 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) == -1) return;
    for (int early = accept(fd, NULL, NULL); early != -1; early = accept(fd, NULL, NULL)) close(early);
    fcntl(fd, F_SETFL, flags);
}

static int sign_listener(int fd, const char *key) {
    union {
        struct sockaddr any;
        struct sockaddr_in6 six;
        struct sockaddr_storage storage;
    } at;
    socklen_t size = sizeof at;
    int open = 0;
    socklen_t open_size = sizeof open;
    if (getsockname(fd, &at.any, &size) == -1) return -1;
    if (at.any.sa_family == AF_INET6) {
        struct sockaddr_in6 mapped = {.sin6_family = AF_INET6};
        struct sockaddr_in6 every = {.sin6_family = AF_INET6};
        /* IPv4 addresses are in a table of their own. */
        mapped.sin6_addr.s6_addr[10] = mapped.sin6_addr.s6_addr[11] = 0xff;
        if (sign(fd, key, &mapped, sizeof mapped, 1) == -1 || sign(fd, key, &every, sizeof every, 1) == -1) return -1;
    } else if (at.any.sa_family == AF_INET) {
        struct sockaddr_in every = {.sin_family = AF_INET};
        if (sign(fd, key, &every, sizeof every, 1) == -1) return -1;
    } else {
        return 0;
    }
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &open, &open_size) == 0 && open) turn_away(fd);
    return 0;
}

static int is_tcp(int fd) {
    int kind = 0;
    socklen_t size = sizeof kind;
    return getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &size) == 0 && kind == SOCK_STREAM;
}

__attribute__((visibility("default"))) int listen(int fd, int backlog) {
    static int (*next)(int, int);
    const char *key = engine_key();
    if (next == NULL) next = (int (*)(int, int))dlsym(RTLD_NEXT, "listen");
    if (key != NULL && signs_for(__builtin_return_address(0)) && is_tcp(fd) && sign_listener(fd, key) == -1) return -1;
    return next(fd, backlog);
}

__attribute__((visibility("default"))) int connect(int fd, const struct sockaddr *peer, socklen_t size) {
    static int (*next)(int, const struct sockaddr *, socklen_t);
    const char *key = engine_key();
    if (next == NULL) next = (int (*)(int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "connect");
    int is_ip = peer != NULL && size >= sizeof(sa_family_t)
        && (peer->sa_family == AF_INET || peer->sa_family == AF_INET6);
    if (key != NULL && is_ip && signs_for(__builtin_return_address(0)) && is_tcp(fd)
        && sign(fd, key, peer, size, 0) == -1) return -1;
    return next(fd, peer, size);
}
