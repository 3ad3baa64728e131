#!/bin/sh
# CUDA 12's compiler in a folder, of the Debian packages in requirements/cuda12.txt: cuda12.sh FOLDER
# Any Debian will do. The packages come from the mirror that apt uses here, by a list of sources of their own; they are unpacked,
# not installed. Fetches 1 GB, keeps 0.2. nvcc is FOLDER/bin/nvcc.
set -eu
rm -rf "$1"
mkdir -p "$1"
folder=$(cd "$1" && pwd)
packages=$(grep -v '^#' requirements/cuda12.txt)
no() { echo "$1" >&2; exit 1; }
grep -qs '^ID=debian' /etc/os-release || no "CUDA 12's compiler can be fetched on Debian alone"

# apt with lists and a cache in a folder that is removed at the end.
work=$(mktemp -d "$folder/apt.XXXX")
trap 'rm -rf "$work"' EXIT
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep '/debian/$' | head -n 1)
[ -n "$mirror" ] || no "apt has no source for Debian's packages here"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] $mirror trixie non-free" >"$work/sources.list"
mkdir -p "$work/lists/partial" "$work/archives/partial"
apt="apt-get -q=2 -o APT::Sandbox::User=root -o Dir::Etc::sourcelist=$work/sources.list -o Dir::Etc::sourceparts=/dev/null
  -o Dir::State::lists=$work/lists -o Dir::Cache=$work"
echo "fetching CUDA 12's compiler: $(echo $packages)"
$apt update
(cd "$work" && $apt download $packages)

# Of 3 GB what compiles and links kernels, laid out as NVIDIA's own toolkit, whose profile of relative paths Debian replaces.
for package in "$work"/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -x -C "$work" --wildcards './usr/include/*' './usr/bin/*' './usr/lib/nvidia-cuda-toolkit/*' \
    './usr/lib/*/libcudart_static.a' 2>"$work/tar.log" || ! grep -v 'Not found in archive\|previous errors' "$work/tar.log"
done
mkdir -p "$folder/bin" "$folder/nvvm/bin" "$folder/lib64"
for tool in bin2c cudafe++ cuobjdump fatbinary nvdisasm nvlink ptxas; do mv "$work/usr/bin/$tool" "$folder/bin"; done
mv "$work/usr/lib/nvidia-cuda-toolkit/bin/nvcc" "$work/usr/lib/nvidia-cuda-toolkit/bin/crt" "$folder/bin"
mv "$work/usr/lib/nvidia-cuda-toolkit/bin/cicc" "$folder/nvvm/bin"
mv "$work/usr/lib/nvidia-cuda-toolkit/libdevice" "$folder/nvvm"
mv "$work/usr/include" "$folder"
mv "$work"/usr/lib/*/libcudart_static.a "$folder/lib64"
cat >"$folder/bin/nvcc.profile" <<'PROFILE'
TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" "-I$(TOP)/cccl/nvidia/cuda_cccl/include"
LIBRARIES += "-L$(TOP)/lib64"
PROFILE
