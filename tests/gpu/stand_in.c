// A stand-in for libcuda.so.1, made by test_cuda_calls: device memory is a memfd, copies are memcpy. It refuses what the
// driver would refuse of the arguments, and writes down what it was given, so that NVIDIA's own bindings can be called
// without a GPU. Environment: PLAIN (no virtual memory API), NOPIN (no registering), LOSE_AT (copies until it is lost).
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <dlfcn.h>
#include <unistd.h>
#include <sys/mman.h>
typedef int R; typedef unsigned long long P; typedef size_t S;
#define X __attribute__((visibility("default")))
#define L(n) fprintf(stderr, "%s\n", n)
X R cuInit(unsigned f){return 0;}
X R cuDriverGetVersion(int*v){*v=13000;return 0;}
X R cuDeviceGet(int*d,int o){*d=o;return o==0?0:101;}
X R cuDeviceGetUuid(void*u,int d){memset(u,0xab,16);return 0;}
X R cuDeviceGetUuid_v2(void*u,int d){memset(u,0xab,16);return 0;}
X R cuDeviceGetAttribute(int*v,int a,int d){*v=getenv("PLAIN")?0:1;return 0;}
X R cuDevicePrimaryCtxRetain(void**c,int d){*c=(void*)0x1234;return 0;}
X R cuDevicePrimaryCtxRelease_v2(int d){return 0;}
X R cuDevicePrimaryCtxRelease(int d){return 0;}
X R cuCtxSetCurrent(void*c){return c==(void*)0x1234?0:201;}
X R cuMemGetAllocationGranularity(S*g,void*p,int o){*g=2<<20;return 0;}
X R cuMemCreate(P*h,S s,void*p,P f){int*q=p; /* type, handletypes, loc type, loc id */ fprintf(stderr,"create size %zu type %d handles %d loc %d id %d\n",s,q[0],q[1],q[2],q[3]); if(s%(2<<20))return 1; int fd=memfd_create("cu",0); ftruncate(fd,s); *h=fd; return 0;}
X R cuMemAddressReserve(P*a,S s,S al,P ad,P f){void*m=mmap(0,s,PROT_NONE,MAP_PRIVATE|MAP_ANONYMOUS|MAP_NORESERVE,-1,0);*a=(P)m;return 0;}
X R cuMemMap(P a,S s,S o,P h,P f){return mmap((void*)a,s,PROT_NONE,MAP_SHARED|MAP_FIXED,(int)h,o)==MAP_FAILED?1:0;}
X R cuMemSetAccess(P a,S s,void*d,S n){int*q=d;fprintf(stderr,"access loc %d id %d flags %d n %zu\n",q[0],q[1],q[2],n);return mprotect((void*)a,s,PROT_READ|PROT_WRITE)?1:0;}
X R cuMemExportToShareableHandle(void*o,P h,int t,P f){*(int*)o=dup((int)h);return t==1?0:1;}
X R cuMemImportFromShareableHandle(P*h,void*fd,int t){*h=dup((int)(intptr_t)fd);return 0;}
X R cuMemUnmap(P a,S s){return mmap((void*)a,s,PROT_NONE,MAP_PRIVATE|MAP_ANONYMOUS|MAP_FIXED,-1,0)==MAP_FAILED;}
X R cuMemAddressFree(P a,S s){return munmap((void*)a,s);}
X R cuMemRelease(P h){return close((int)h);}
X R cuMemsetD8Async(P d,unsigned char c,S n,void*s){memset((void*)d,c,n);return 0;}
X R cuMemHostRegister_v2(void*p,S n,unsigned f){fprintf(stderr,"register %zu flags %u\n",n,f);return getenv("NOPIN")?801:0;}
X R cuMemHostRegister(void*p,S n,unsigned f){return cuMemHostRegister_v2(p,n,f);}
X R cuMemHostUnregister(void*p){L("unregister");return 0;}
X R cuStreamCreate(void**s,unsigned f){*s=malloc(8);return f==1?0:1;}
X R cuStreamDestroy_v2(void*s){return 0;} X R cuStreamDestroy(void*s){return 0;}
X R cuStreamSynchronize(void*s){return 0;}
static int copies;
X R cuMemcpyHtoDAsync_v2(P d,const void*h,S n,void*s){const char*l=getenv("LOSE_AT"); if(l&&++copies>atoi(l))return 700; memcpy((void*)d,h,n);return 0;}
X R cuMemcpyDtoHAsync_v2(void*h,P d,S n,void*s){const char*l=getenv("LOSE_AT"); if(l&&copies>atoi(l))return 700; memcpy(h,(void*)d,n);return 0;}
X R cuMemcpyDtoDAsync_v2(P d,P h,S n,void*s){memcpy((void*)d,(void*)h,n);return 0;}
X R cuEventCreate(void**e,unsigned f){*e=malloc(8);return f==3?0:1;}
X R cuEventRecord(void*e,void*s){return 0;}
X R cuEventSynchronize(void*e){return 0;}
X R cuEventDestroy_v2(void*e){free(e);return 0;} X R cuEventDestroy(void*e){free(e);return 0;}
X R cuDeviceGetCount(int*n){*n=1;return 0;}
X R cuDeviceCanAccessPeer(int*c,int d,int p){*c=0;return 0;}
static int pushed;
X R cuCtxPushCurrent_v2(void*c){pushed++;return c==(void*)0x1234?0:201;}
X R cuCtxPopCurrent_v2(void**c){*c=(void*)0x1234;return pushed-->0?0:201;}
X R cuIpcOpenMemHandle_v2(P*a,struct{char b[64];}h,unsigned f){for(int i=0;i<64;i++)if(h.b[i]!=0x5c)return 1; fprintf(stderr,"open by name flags %u\n",f); *a=(P)calloc(1,2<<20);memset((void*)*a,7,2<<20);return 0;}
X R cuIpcCloseMemHandle(P a){L("close by name");free((void*)a);return 0;}
X R cuMemAlloc_v2(P*a,S n){*a=(P)aligned_alloc(4096,n);return 0;}
X R cuMemFree_v2(P a){free((void*)a);return 0;}
X R cuIpcGetMemHandle(void*h,P a){memset(h,0x5c,64);return 0;}
X R cuGetErrorName(R e,const char**n){*n="E";return 0;}
static R find(const char*s,void**f){char b[200]; void*h=dlopen(0,RTLD_NOW);(void)h; Dl_info i; dladdr((void*)cuInit,&i); void*m=dlopen(i.dli_fname,RTLD_NOW|RTLD_NOLOAD); snprintf(b,200,"%s_v2",s); *f=dlsym(m,b); if(!*f)*f=dlsym(m,s); return *f?0:500;}
X R cuGetProcAddress(const char*s,void**f,int v,uint64_t fl){return find(s,f);}
X R cuGetProcAddress_v2(const char*s,void**f,int v,uint64_t fl,int*st){R r=find(s,f); if(st)*st=r?1:0; return r;}
